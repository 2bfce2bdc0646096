"""`SeriesFormat`: a format whose images are series of files of any names, as DICOM's are.

The one without a suffix takes folders, and files that no other format knows by their suffix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from medfedaug.data.io.base import Header, ImageFormat

Skip = Callable[[Path], str | None]
"""Returns why a folder is left out; ``""`` leaves it out silently, ``None`` takes it."""


class LeftOut(NamedTuple):
    """File or folder that belongs to no case, and the reason, without a full stop."""

    path: Path
    reason: str


class Series(Protocol):
    """A volume of several files: its identity, a part of a series with several volumes, and a description."""

    @property
    def part(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def files(self) -> tuple[Path, ...]: ...
    @property
    def folders(self) -> tuple[Path, ...]: ...
    @property
    def text(self) -> str: ...


_Series = TypeVar("_Series", bound=Series, covariant=True)


@dataclass(frozen=True)
class Scan(Generic[_Series]):
    """Content of a folder: series by folder and identity, images of other formats, and the rest."""

    series: tuple[_Series, ...]
    others: tuple[Path, ...]
    left_out: tuple[LeftOut, ...]


@dataclass
class Selection(Generic[_Series]):
    """Series of a scan that are cases; in ``unclear`` folders several could be meant."""

    chosen: list[_Series] = field(default_factory=list)
    unclear: list[LeftOut] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


class SeriesFormat(ImageFormat):
    """A format whose images are series of files of any names."""

    @abstractmethod
    def recognises(self, file: Path) -> bool:
        """Return whether a file is of this format, by its content."""

    @abstractmethod
    def scan(
        self, root: Path, skip: Skip = lambda folder: None, take: Callable[[Path], bool] = lambda file: False
    ) -> Scan[Series]:
        """Look at all files in a folder and below it, through links, but in no folder twice.

        ``take`` returns whether a file is, by its name, an image of another format; it is not opened.
        """

    @abstractmethod
    def select(self, series: Sequence[Series], pattern: str | None = None) -> Selection[Series]:
        """Choose one series of each study in each folder.

        ``pattern`` is the identity of a series, or a regular expression that describes it.
        """

    @abstractmethod
    def place(self, series: Series, others: Sequence[Series]) -> Path | None:
        """Return the path by which one series of a scan is read; ``None`` where there is none."""

    @abstractmethod
    def remarks(self, path: Path) -> list[str]:
        """Return sentences for the user about an image."""


class NoSeries(SeriesFormat):
    """The format without a suffix of an installation that reads no series."""

    title = "series of files"

    def read_header(self, path: Path) -> Header:
        raise ValueError("no image, by its name")

    def read_volume(self, path: Path) -> np.ndarray:
        raise ValueError("no image, by its name")

    def recognises(self, file: Path) -> bool:
        return False

    def scan(
        self, root: Path, skip: Skip = lambda folder: None, take: Callable[[Path], bool] = lambda file: False
    ) -> Scan[Series]:
        left_out: list[LeftOut] = []
        files = [file for _, files in walk(root, skip, left_out) for file in files]
        others = tuple(file for file in files if take(file))
        unknown = [LeftOut(file, "no image, by its name") for file in files if file not in {*others}]
        return Scan((), others, (*left_out, *unknown))

    def select(self, series: Sequence[Series], pattern: str | None = None) -> Selection[Series]:
        return Selection()

    def place(self, series: Series, others: Sequence[Series]) -> Path | None:
        return None

    def remarks(self, path: Path) -> list[str]:
        return []


def walk(
    folder: Path, skip: Skip, left_out: list[LeftOut], seen: set[tuple[int, int]] | None = None
) -> Iterator[tuple[Path, list[Path]]]:
    """Yield each folder with its visible files; append what is left out."""
    seen = set() if seen is None else seen
    try:
        status = folder.stat()
        paths = sorted(folder.iterdir())
    except OSError as error:
        left_out.append(LeftOut(folder, f"cannot be opened ({error.strerror or error})"))
        return
    if (status.st_dev, status.st_ino) in seen:
        left_out.append(LeftOut(folder, "a link to a folder that is looked at already"))
        return
    seen.add((status.st_dev, status.st_ino))
    visible = [path for path in paths if not path.name.startswith(".")]
    folders = [path for path in visible if path.is_dir()]
    yield folder, [path for path in visible if path not in {*folders}]
    for below in folders:
        reason = skip(below)
        if reason is None:
            yield from walk(below, skip, left_out, seen)
        elif reason:
            left_out.append(LeftOut(below, reason))
