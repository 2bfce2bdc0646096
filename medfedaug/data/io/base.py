"""`ImageFormat`: suffixes of an image format, and how its files are read and its label maps written.

`SeriesFormat`: one whose images are series of files of any names, as DICOM's are. The one without a suffix
takes folders, and files that no other format knows by their suffix.

A format is one file of this package with an object `FORMAT`, which `medfedaug.data.io.formats` finds. All are
imported for their suffixes, also by commands that decode nothing: each imports the library that reads its
files where it reads one.
"""

from __future__ import annotations

import gzip
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

_UPRIGHT = float(np.cos(np.deg2rad(20)))
_SHORTEST, _LONGEST = 1e-4, 1e3  # edges of a voxel, mm; no scanner writes numbers beyond these

FileState = tuple[str, int | None, int | None]
"""Absolute path, time of the last change in ns, and size: another version of a file has another state."""


def file_state(file: Path) -> FileState:
    """Return the state of a file; a missing file has ``None`` as time and size."""
    if not file.exists():
        return str(file.absolute()), None, None
    status = file.stat()
    return str(file.absolute()), status.st_mtime_ns, status.st_size


@dataclass(frozen=True)
class Segments:
    """The classes of a label map; a format that records more adds its fields."""

    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Header:
    """The properties of a volume that are known without decoding it.

    Args:
        shape: voxels along x, y and z.
        channels: values of one voxel.
        affine: (4, 4), from voxel indices to millimetres in RAS; ``None`` where the file does not say.
        white: the intensity of white in a photograph; ``None`` for a volume, which has no fixed scale.
    """

    shape: tuple[int, ...]
    channels: int
    affine: np.ndarray | None
    white: int | None = None

    @cached_property
    def axes(self) -> str:
        """Directions of x, y and z, for instance ``"RAS"``; empty where the file does not say."""
        if self.affine is None:
            return ""
        from nibabel import aff2axcodes

        return "".join(map(str, aff2axcodes(self.affine)))

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """Voxel size, mm; empty where the file does not say."""
        return () if self.affine is None else tuple(np.linalg.norm(self.affine[:3, :3], axis=0).tolist())

    @property
    def upright_axes(self) -> str:
        """`axes`, where each is within 20 degrees of its direction; else empty."""
        if self.affine is None or not all(self.edges):
            return ""
        nearest = np.abs(self.affine[:3, :3] / self.edges).max(axis=0)
        return self.axes if nearest.min() > _UPRIGHT else ""

    def distance(self, other: Header) -> float:
        """Return the largest distance, mm, of a corner from its place in a header of the same shape."""
        if self.affine is None or other.affine is None or np.array_equal(self.affine, other.affine):
            return 0.0
        corners = np.array([(*corner, 1) for corner in product(*((0, n - 1) for n in self.shape))])
        differences = corners @ (self.affine - other.affine).T
        return float(np.linalg.norm(differences[:, :3], axis=1).max())


def volume_header(shape: Sequence[int], affine: np.ndarray | None) -> Header:
    """Make the header of a volume with three axes, or a fourth for channels."""
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise ValueError(f"{len(shape)}-dimensional, {' x '.join(map(str, shape))}: expected a volume")
    if affine is not None and not (np.isfinite(affine).all() and np.linalg.det(affine)):
        raise ValueError("its header gives it no place: the affine is singular or not finite")
    return Header(tuple(map(int, shape[:3])), int(shape[3]) if len(shape) > 3 else 1, affine)


def channels_first(voxels: np.ndarray) -> np.ndarray:
    """Bring the voxels of a volume, (X, Y, Z) or (X, Y, Z, C), to float32 of shape (C, X, Y, Z)."""
    if np.iscomplexobj(voxels):
        raise ValueError("has complex voxels, expected real numbers")
    stored = np.array(voxels, np.float32, order="C")
    return stored.reshape(1, *stored.shape) if stored.ndim == 3 else np.moveaxis(stored, -1, 0)


def pack_nifti(image: Any, file: IO[bytes]) -> None:
    """Write an image of nibabel as ``.nii.gz``, without the time and the name that gzip adds."""
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed:
        image.to_stream(packed)


def save_nifti(image: Any, path: Path) -> None:
    """Save an image of nibabel: ``.nii.gz`` by `pack_nifti`, another suffix by nibabel."""
    if not path.name.lower().endswith(".nii.gz"):
        import nibabel

        nibabel.save(image, path)
        return
    with path.open("wb") as file:
        pack_nifti(image, file)


class ImageFormat(ABC):
    """A format of images: volumes, or photographs as volumes of one slice.

    Voxels are indexed (x, y, z) as they are stored, and the affine takes these indices to millimetres in RAS,
    so that one volume gives the same array and the same affine in each format. A reading method may raise any
    exception, and `ValueError` for a file without a volume; its caller makes one line of the exception.

    Attributes:
        title: name and suffixes, for messages.
        suffixes: endings of its files' names, in small letters, with the dot, the longest first. Files whose
            suffix ends with ``.gz`` are compressed by gzip as a whole.
        voxel_suffixes: endings of files that hold the voxels of a separate header, and are not images.
        lossy: suffixes whose files do not keep every value.
        photograph: whether its images have a fixed scale of intensity (`Header.white`), and no millimetres.
    """

    title: str
    suffixes: tuple[str, ...] = ()
    voxel_suffixes: tuple[str, ...] = ()
    lossy: tuple[str, ...] = ()
    photograph: bool = False

    @abstractmethod
    def read_header(self, path: Path) -> Header:
        """Read a volume's properties, if possible without decoding it."""

    @abstractmethod
    def read_volume(self, path: Path) -> np.ndarray:
        """Read a volume as it is stored, float32 of shape (C, X, Y, Z); Z is 1 for a photograph."""

    def read_label(self, path: Path) -> np.ndarray:
        """Read a label map, float32 of shape (1, X, Y, Z)."""
        return self.read_volume(path)

    def voxel_files(self, path: Path) -> list[Path]:
        """Return the files that hold the voxels of an image."""
        return [path]

    def own_suffix(self, image: Path) -> str:
        """Return the suffix of an image of this format, as spelled in its name."""
        known = next(suffix for suffix in self.suffixes if image.name.lower().endswith(suffix))
        return image.name[-len(known) :]

    def label_suffix(self, image: Path) -> str:
        """Return the suffix of an image's label map: NIfTI's, where the format has no writer."""
        return ".nii.gz"

    def probability_files(self, label: str, classes: int) -> list[str]:
        """Return the names of the files with the probabilities of the classes, for a label map's name."""
        return [label]

    def write_label_map(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write a label map, (X, Y, Z) unsigned integers, with its image's geometry, by default as NIfTI.

        The file has the suffix of `label_suffix`; other files written to its folder are kept. Of an image of
        several files, ``image`` is the first.
        """
        from nibabel import Nifti1Image

        save_nifti(Nifti1Image(voxels, self.read_header(image).affine), path)

    def write_probabilities(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write the probabilities of the classes, (X, Y, Z, K), float32; else as `write_label_map`."""
        self.write_label_map(path, image, voxels, segments)


def plausible_edges(edges: Iterable[float]) -> bool:
    """Return whether voxels can have these edges, mm.

    Example:
        >>> plausible_edges((0.5, 0.5, 3)), plausible_edges((0, 1, 1)), plausible_edges((1e9, 1, 1))
        (True, False, False)
    """
    return all(_SHORTEST <= edge <= _LONGEST for edge in edges)


def problem_of_edges(edges: Sequence[float]) -> str:
    """Return the fault of a header with a voxel size, mm; empty without one."""
    if plausible_edges(edges):
        return ""
    text = " x ".join(f"{float(edge):.4g}" for edge in edges)
    return f"its header has voxels of {text} mm, expected {_SHORTEST} to {_LONGEST} mm"


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

    def read_header(self, path: Path) -> NoReturn:
        raise ValueError("no image, by its name")

    read_volume = read_header

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
