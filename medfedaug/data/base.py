"""A site's data as a task sees it: named cases in three splits, whatever the files are."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from medfedaug.data.annotation import Annotation
from medfedaug.data.io.formats import file_states
from medfedaug.errors import DataError, ReaderError, first_line, own, withheld
from medfedaug.utils.files import real_paths

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from medfedaug.data.preparation.preparation import Preparation

SPLITS = ("training", "validation", "test")

_Any = TypeVar("_Any")


@dataclass(frozen=True)
class Case:
    """Image of a site, with label, patient and name.

    Args:
        name: unique within the site.
        image: path of the image, or of the file that holds it among others.
        label: path of the label map, or the name of the class.
        index: its place in a file that holds many.
        patient: whose image it is, where the list says so.
        others: further files of an image in several files, whose channels follow those of ``image``.
        annotated: the classes that its label map has outlined, where these may not be all.
    """

    name: str
    image: Path
    label: Path | str
    index: int | None = None
    patient: str = ""
    others: tuple[Path, ...] = ()
    annotated: tuple[str, ...] | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """List all files of the image, in the order of their channels."""
        return (self.image, *self.others)

    @property
    def owner(self) -> tuple[str, str]:
        """Return the owner of the image: the patient, or where the list names none, the case itself."""
        return (self.patient, "") if self.patient else ("", self.name)


class Listing(NamedTuple):
    """Content of a site's folder; the fields are those of `SiteFolder`, and may be left out."""

    classes: tuple[str, ...]
    cases: dict[str, Sequence[Case]]
    channel_names: tuple[str, ...] = ()
    label_values: tuple[int, ...] = ()
    ignore: int | None = None


@dataclass(frozen=True)
class SiteFolder(ABC):
    """A site's data.

    Args:
        cases: the cases of each of `SPLITS`.
        channel_names: those of the images' channels in their order, where they are named.
        label_values: the value of each class in the label maps, where they are not 0, 1, 2, ...; -1 of a
            class of the federation that the site does not name.
        ignore: the value of voxels of which nobody knows the class.
        annotation: the code of its label maps, where some class or voxel may not be annotated.
        federation_channels: those that `load_image` gives, in its order, where the site's own have a place
            among them (`with_channels`).
        benchmark: the published data set that it is of, or ``phantom``; empty for a site's own data.
    """

    name: str
    path: Path
    classes: tuple[str, ...]
    cases: dict[str, tuple[Case, ...]]
    channel_names: tuple[str, ...] = field(default=(), kw_only=True)
    label_values: tuple[int, ...] = field(default=(), kw_only=True)
    ignore: int | None = field(default=None, kw_only=True)
    annotation: Annotation | None = field(default=None, kw_only=True)
    federation_channels: tuple[str, ...] = field(default=(), kw_only=True)
    benchmark: str = field(default="", kw_only=True)

    task: ClassVar[str]
    listing: ClassVar[str]
    """Name of the list of cases, for messages."""

    @classmethod
    def open(
        cls, path: str | Path, name: str | None = None, limit: int | None = None, check: bool = True
    ) -> Self:
        """List the cases of a folder.

        Args:
            path: the site's folder.
            name: the site's name; by default the folder's.
            limit: at most so many cases of each split, evenly from the whole list.
            check: whether to check the splits, or to leave that to the caller.
        """
        path = Path(path)
        name = name or path.resolve().name
        listed = cls.list_cases(path, name)
        cases = {split: tuple(listed.cases.get(split, ())) for split in SPLITS}
        site = cls(name, path, **{**listed._asdict(), "cases": cases})
        site = site.with_classes(site.classes)
        if check:
            site.check_splits()
        return site.limited(limit)

    @classmethod
    def list_cases(cls, path: Path, name: str) -> Listing:
        """List the content of a folder, or raise `DataError`: an archive does not say what is whose."""
        raise DataError("is part of a benchmark, which must be named", site=name, path=path)

    @property
    def scaling(self) -> str:
        """Scaling of `load_image`: ``"each volume"`` by its own range, or all by one ``"fixed"`` number."""
        return "fixed"

    @property
    def trains(self) -> bool:
        """Return whether the site has training cases; one with test cases alone is an unseen site."""
        return bool(self.cases["training"])

    def patients(self, split: str) -> dict[str, int]:
        """Number the patients of a split: by case, a number that a patient's cases share.

        Empty where the list names no patient of the split: every case then stands for one.
        """
        cases = self.cases[split]
        if not any(case.patient for case in cases):
            return {}
        numbers: dict[tuple[str, str], int] = {}
        return {case.name: numbers.setdefault(case.owner, len(numbers)) for case in cases}

    def cases_of_patients(self, split: str) -> tuple[int, ...]:
        """Count the cases of each patient in a split; a case without a named patient stands for one."""
        return tuple(map(len, by_patient(self.cases[split])))

    @abstractmethod
    def check_files(self) -> int:
        """Check that the files of all cases exist and fit, if possible without decoding them.

        Returns:
            The number of channels of the images.
        """

    @abstractmethod
    def load_image(self, case: Case, intensity: str = "raw") -> torch.Tensor:
        """The image, (C, *spatial), in the file's units or, with ``"scale"``, scaled to [0, 1]."""

    def read_files(self, case: Case) -> list[torch.Tensor]:
        """The voxels of the image as they are stored, (C, *spatial), by file where it has several."""
        return [self.load_image(case)]

    def upright_axes(self) -> dict[str, Path]:
        """The directions of the volumes' axes, each with one volume that has it; see `VolumeFolder`."""
        return {}

    def images(
        self, split: str, intensity: str = "raw", preparation: Preparation | None = None
    ) -> Iterator[torch.Tensor]:
        """The images of a split as a network's task sees them, (C, *spatial), one in memory at a time."""
        from medfedaug.data.preparation.preparation import Preparation

        prepared = preparation or Preparation()
        return (self.prepared_image(case, intensity, prepared) for case in self.cases[split])

    def prepared_image(self, case: Case, intensity: str, preparation: Preparation) -> torch.Tensor:
        """An image, brought to what a plan says."""
        return preparation.image(self.load_image(case, intensity), None)

    def identity(self, case: Case) -> tuple[object, ...]:
        """Return the identity of a prepared case: its files' paths, times and sizes, and the site."""
        files = [*case.files, *([case.label] if isinstance(case.label, Path) else [])]
        found: list[object] = [case.name, case.index, "" if isinstance(case.label, Path) else case.label]
        found += [] if case.annotated is None else [case.annotated]
        # Also what a benchmark's own site knows besides, which may decide over its images.
        own = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in ("cases", "path"))
        found += [type(self).__name__, *own]
        return (*found, *file_states(files))

    def with_channels(self, names: Sequence[str]) -> Self:
        """The site with images that have a federation's channels, in its order.

        Channels are found by their names, in which capitals, spaces, ``_`` and ``-`` do not matter. A channel
        that the site does not have is 0 after scaling. Where the federation or the site names none, the
        images stay as they are.
        """
        if not names or not self.channel_names:
            return self
        known = {plain_name(name) for name in names}
        for name in self.channel_names:
            if plain_name(name) not in known:
                raise self.error(
                    f"has the channel {name!r}, and the federation's are {', '.join(names)}",
                    hint="Name a channel alike at all sites; one site has to have them all.",
                )
        return replace(self, federation_channels=tuple(names))

    @property
    def partial(self) -> bool:
        """Return whether some case may have a class or a voxel that is not annotated."""
        cases = (case for split in SPLITS for case in self.cases[split])
        return self.ignore is not None or any(case.annotated is not None for case in cases)

    def annotated(self, *splits: str, in_all: bool = False) -> tuple[str, ...]:
        """Return the classes that some case of the site has annotated, without the background.

        Args:
            splits: the splits to look at; all by default.
            in_all: whether only those that every case shows in full: none where a voxel may be unknown.
        """
        plain = [plain_name(name) for name in self.classes]
        sets = [
            self.annotated_set(case, plain)[1:] for split in splits or SPLITS for case in self.cases[split]
        ]
        if not sets or (in_all and self.ignore is not None):
            return ()
        chosen = map(all if in_all else any, zip(*sets, strict=True))
        return tuple(compress(self.classes[1:], chosen))

    def without_unlabelled(self) -> Self:
        """The site without the training cases that have nothing annotated; it may train no more."""
        training = tuple(case for case in self.cases["training"] if case.annotated != ())
        return replace(self, cases={**self.cases, "training": training})

    def with_classes(self, names: Sequence[str], sites: Sequence[SiteFolder] = ()) -> Self:
        """The site with label maps that have a federation's classes, by their names, in its order.

        A site whose cases are all complete stays as it is: it has the classes of the federation.

        Args:
            names: the federation's classes, background first.
            sites: sites with which it shares the code of its label maps.

        Raises:
            DataError: when the site has annotated a class that the federation does not know.
        """
        if not self.partial:
            return self
        known, own = [plain_name(name) for name in names], [plain_name(name) for name in self.classes]
        for name in self.annotated():
            if plain_name(name) not in known[1:]:
                near = get_close_matches(plain_name(name), known[1:], 1)
                meant = f" Did the site mean {names[known.index(near[0])]!r}?" if near else ""
                raise self.error(
                    f"has annotated {name!r}, and the federation's classes are {', '.join(names[1:])}",
                    hint=f"Write the federation's name in labels and in labelled.{meant}",
                )
        if own[0] in known[1:]:
            raise DataError(
                f"has {self.classes[0]!r} as its lowest value, which stands for the background, and the "
                "federation has a class of that name",
                site=self.name,
                path=self.path / self.listing,
                hint="Give the background the lowest value in labels and label maps.",
            )
        values = self.label_values or tuple(range(len(self.classes)))
        # The background is the first class, whatever its name.
        of_class = {**dict(zip(own, values, strict=True)), known[0]: values[0]}
        placed = tuple(of_class.get(name, -1) for name in known)
        shared = [(one, case) for one in (sites or [self]) for case in one.listed_cases]
        unknown = any(one.ignore is not None or case.annotated == () for one, case in shared)
        sets = [self.annotated_set(case, known) for _, case in shared]
        return replace(
            self,
            classes=tuple(names),
            label_values=placed,
            annotation=Annotation.of(len(names), sets, has_unknown=unknown),
        )

    @property
    def listed_cases(self) -> Iterator[Case]:
        """The cases of all splits."""
        return (case for split in SPLITS for case in self.cases[split])

    @staticmethod
    def annotated_set(case: Case, plain: Sequence[str]) -> tuple[bool, ...]:
        """Return whether a case has each class, by `plain_name`, annotated; the background counts as such."""
        if case.annotated is None:
            return (True,) * len(plain)
        there = {plain_name(name) for name in case.annotated}
        return (True, *(name in there for name in plain[1:]))

    @property
    def channel_places(self) -> tuple[int, ...]:
        """The federation's index of each of the site's channels; empty where nothing moves."""
        own, names = (tuple(map(plain_name, n)) for n in (self.channel_names, self.federation_channels))
        return () if own == names or not names else tuple(names.index(name) for name in own)

    @property
    def missing_channels(self) -> tuple[int, ...]:
        """The federation's channels that the site does not have."""
        places = self.channel_places
        return tuple(i for i in range(len(self.federation_channels)) if places and i not in places)

    def limited(self, limit: int | None) -> Self:
        """The site with at most this many cases per split, spread evenly over the list."""
        return replace(self, cases={split: spread(cases, limit) for split, cases in self.cases.items()})

    def error(self, problem: str, path: Path | None = None, *, hint: str = "") -> DataError:
        """Return an error that names the site and a file, by default its list."""
        where = self.path / self.listing if path is None else path
        return DataError(problem, site=self.name, path=where, hint=hint)

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Name site and file in an error, whatever a reader raises: a damaged file fails anywhere."""
        try:
            yield
        except Exception as error:
            raise unreadable(self.name, path, error) from error

    def check_splits(self) -> None:
        """Check that the splits make a site that trains, or one that is tested only.

        Raises:
            DataError: when a split is empty that must not be, or a case is in more than one place.
        """
        empty = [split for split in SPLITS if not self.cases[split]]
        if set(empty) == set(SPLITS):
            raise self.error("lists no case")
        # Test cases alone make an unseen site, which is evaluated and never trains.
        if empty and empty != ["training", "validation"]:
            raise self.error(
                f"the split {empty[0]!r} is empty",
                hint="A site trains with all three splits, or is tested only, with test cases alone.",
            )
        self._check_patients()
        files = real_paths(c.image for c in self.listed_cases)
        places: set[tuple[Path, int | None]] = set()
        names: dict[str, Path] = {}
        for case in self.listed_cases:
            place = (files[case.image], case.index)
            if place in places:
                raise self.error(
                    "listed more than once",
                    case.image,
                    hint="A patient belongs to one split only, or the test is not one.",
                )
            if case.name in names:
                raise self.error(
                    f"another case, {own(names[case.name])}, has the same name '{own(case.name)}'",
                    case.image,
                    hint="Results are told apart by name: rename one of the files.",
                )
            places.add(place)
            names[case.name] = case.image

    def _check_patients(self) -> None:
        seen: dict[str, tuple[str, Case]] = {}
        for split in SPLITS:
            for case in self.cases[split]:
                other, first = seen.setdefault(case.patient, (split, case)) if case.patient else (split, case)
                if other != split:
                    raise self.error(
                        f"patient {own(case.patient)} is in {split}, and in {other} with {own(first.name)}",
                        case.image,
                        hint="A patient belongs to one split only, or the test is not one.",
                    )


def is_own_data(sites: Iterable[SiteFolder]) -> bool:
    """Return whether no site has images of a published data set or of the phantom."""
    return not any(site.benchmark for site in sites)


def patient_name(named: object) -> str:
    """The name of a patient as a list has it, as text; empty where it has none.

    >>> patient_name(7), patient_name(" 7 "), patient_name(None)
    ('7', '7', '')
    """
    return "" if named is None else str(named).strip()


def plain_name(name: str) -> str:
    """A name without what does not matter in it: capitals, spaces, ``_`` and ``-``."""
    return " ".join(re.split(r"[\s_-]+", name.casefold()))


def by_patient(cases: Iterable[Case]) -> list[list[Case]]:
    """The cases of each patient, in the order of their first ones."""
    patients: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        patients.setdefault(case.owner, []).append(case)
    return list(patients.values())


def spread(cases: Sequence[_Any], limit: int | None) -> tuple[_Any, ...]:
    """Choose at most ``limit`` cases, spread evenly over the list, which may be sorted by class."""
    if limit is None or limit >= len(cases):
        return tuple(cases)
    return tuple(cases[int(i * len(cases) / limit)] for i in range(limit))


def drawn_over_patients(cases: Sequence[Case], limit: int | None, least: int = 1) -> tuple[Case, ...]:
    """Choose about ``limit`` cases of as many patients as possible, equally many of each that has so many.

    The patients are spread evenly over the list. A case that names no patient counts as one. The choice
    leaves out images of nobody, or of ``least`` patients or more: all cases together are known from other
    releases, and the difference would be about the patients who are left out. Where neither is possible, all
    cases are chosen.

    Args:
        cases: in the order of the site's list.
        limit: about so many, and never fewer than ``least`` patients; ``None`` for all.
        least: the fewest patients that a value may be about.

    Example:
        >>> cases = [Case(n, Path(n), "", patient=n[0]) for n in ("a1", "a2", "a3", "b1", "c1", "c2")]
        >>> [case.name for case in drawn_over_patients(cases, 4)]
        ['a1', 'b1', 'c1']
    """
    if limit is None or len(cases) <= limit:
        return tuple(cases)
    everybody = by_patient(cases)
    patients = spread(everybody, max(limit, least))
    each = max(1, limit // len(patients))
    whole = sum(len(own) <= each for own in patients)
    if 0 < len(everybody) - whole < least:
        return tuple(cases)
    return tuple(case for own in patients for case in spread(own, each))


def weights_by_patient(cases: Sequence[Case]) -> list[float]:
    """Return a weight for each case; every patient has the same, and all add up to 1.

    Example:
        >>> weights_by_patient([Case(n, Path(n), "", patient=n[0]) for n in ("a1", "a2", "b1")])
        [0.25, 0.25, 0.5]
    """
    own = Counter(case.owner for case in cases)
    return [1 / (len(own) * own[case.owner]) for case in cases]


def check_below(folder: Path, listed: str, site: str, listing: Path) -> None:
    """Check that a relative path does not leave its folder; absolute paths and links are allowed."""
    if not os.path.isabs(listed) and os.path.normpath(listed).split(os.sep)[0] == os.pardir:
        raise DataError(
            f"names {own(listed)}, which is not below {own(folder)}",
            site=site,
            path=listing,
            hint="Put the file there, or a link to it, or write its absolute path.",
        )


def unreadable(site: str, path: Path, error: Exception) -> DataError:
    """The error for a file that a reader could not read."""
    said = str(error) if isinstance(error, ReaderError) else first_line(error)
    return DataError(
        f"cannot be read as an image ({withheld(said)})",
        site=site,
        path=path,
        hint="Replace the file or take the case out of the list.",
    )


def base_folder(root: Path, *names: str) -> Path:
    """The folder below ``root`` that an archive unpacks into, or ``root`` where there is none."""
    return next((root / name for name in names if (root / name).is_dir()), root)
