"""Data of a site: named cases of any format, in three splits that a list gives or a permutation draws."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import numpy as np

from medfedaug.config.run import derive_seed
from medfedaug.data.annotation import Annotation
from medfedaug.data.io.formats import file_states
from medfedaug.errors import DataError, ReaderError, first_line, own, translated, withheld

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from medfedaug.data.preparation.preparation import Preparation

SPLITS = ("training", "validation", "test")

T = TypeVar("T")
# Without published splits; seeds are names alone, so that all runs share a split.
_SHARES = (0.6, 0.2)
_ONE_SPLIT = "A patient belongs to one split only, or the test is not one."


@dataclass(frozen=True)
class Case:
    """Image of a site, with label, patient and name."""

    name: str  # unique within the site
    image: Path  # path of the image, or of the archive that holds it
    label: Path | str  # path of the label map, or the name of the class
    index: int | None = None  # position in an archive
    patient: str = ""  # name of the patient; empty where the list names none
    others: tuple[Path, ...] = ()  # further files of the image; their channels follow those of `image`
    annotated: tuple[str, ...] | None = None  # the classes that the label map outlines; `None` for all

    @property
    def files(self) -> tuple[Path, ...]:
        """List all files of the image, in the order of their channels."""
        return (self.image, *self.others)

    @property
    def owner(self) -> tuple[str, str]:
        """Return the patient, or the case itself where the list names no patient."""
        return (self.patient, "") if self.patient else ("", self.name)


class Listing(NamedTuple):
    """Content of a site's folder, as fields of `SiteFolder`."""

    classes: tuple[str, ...]
    cases: dict[str, Sequence[Case]]
    channel_names: tuple[str, ...] = ()
    label_values: tuple[int, ...] = ()
    ignore: int | None = None


@dataclass(frozen=True)
class SiteFolder(ABC):
    """A site's data."""

    name: str
    path: Path
    classes: tuple[str, ...]
    cases: dict[str, tuple[Case, ...]]  # the cases of each of `SPLITS`
    # Names of the images' channels in order; empty where the list names none.
    channel_names: tuple[str, ...] = field(default=(), kw_only=True)
    # The value of each class in the label maps; empty for 0, 1, 2, ...; -1 for a class of the federation that
    # the site does not name.
    label_values: tuple[int, ...] = field(default=(), kw_only=True)
    ignore: int | None = field(default=None, kw_only=True)  # the value of voxels of unknown class
    # The code of the label maps, where some class or voxel may not be annotated.
    annotation: Annotation | None = field(default=None, kw_only=True)
    # Names of the channels that `load_image` returns, in order (`with_channels`); empty for the site's own.
    federation_channels: tuple[str, ...] = field(default=(), kw_only=True)
    # Name of the published data set, or `phantom`; empty for a site's own data.
    benchmark: str = field(default="", kw_only=True)

    task: ClassVar[str]
    listing: ClassVar[str]
    """Name of the list of cases, for messages."""

    @classmethod
    def open(
        cls, path: str | Path, name: str | None = None, limit: int | None = None, check: bool = True
    ) -> Self:
        """List the cases of a folder, with arguments as `medfedaug.data.sites.open_site`."""
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
    @abstractmethod
    def list_cases(cls, path: Path, name: str) -> Listing:
        """List the content of a folder."""

    @property
    def scaling(self) -> str:
        """Scaling of `load_image`: ``"each volume"`` by its range, or ``"fixed"`` for one divisor."""
        return "fixed"

    @property
    def published(self) -> bool:
        """Return whether the images are of a published data set."""
        return self.benchmark not in ("", "phantom")

    @property
    def trains(self) -> bool:
        """Return whether the site has training cases; an unseen site has only test cases."""
        return bool(self.cases["training"])

    def cases_of(self, split: str) -> tuple[Case, ...]:
        """Return the cases of a split; refuse a site without any."""
        if not self.cases.get(split):
            raise self.error(f"no case in the split {split!r}")
        return self.cases[split]

    def patients(self, split: str) -> dict[str, int]:
        """Number the patients of a split, by case; empty where every case stands for a patient."""
        cases = self.cases[split]
        if not any(case.patient for case in cases):
            return {}
        numbers: dict[tuple[str, str], int] = {}
        return {case.name: numbers.setdefault(case.owner, len(numbers)) for case in cases}

    def cases_of_patients(self, split: str) -> tuple[int, ...]:
        """Count the cases of each patient of a split; a case without a patient's name stands for one."""
        return tuple(map(len, by_patient(self.cases[split])))

    @abstractmethod
    def check_files(self) -> int:
        """Check that the files of all cases exist and fit; return the number of channels."""

    @abstractmethod
    def load_image(self, case: Case, intensity: str = "raw") -> torch.Tensor:
        """Return the image, (C, *spatial), in the file's units or, with ``"scale"``, scaled to [0, 1]."""

    def check_pixels(self, case: Case) -> None:
        """Decode a case's image and check its values; where possible without PyTorch."""
        self.load_image(case)

    def read_files(self, case: Case) -> list[torch.Tensor]:
        """Return the stored voxels of each file of the image, (C, *spatial)."""
        return [self.load_image(case)]

    def upright_axes(self) -> dict[str, Path]:
        """Return the directions of the volumes' axes, each with one volume; see `VolumeFolder`."""
        return {}

    def prepared_image(self, case: Case, intensity: str, preparation: Preparation) -> torch.Tensor:
        """Return a prepared image, (C, *spatial)."""
        return preparation.image(self.load_image(case, intensity), None)

    def identity(self, case: Case) -> tuple[object, ...]:
        """Return the identity of a prepared case: its files' paths, times and sizes, and the site."""
        label, files = ("", (case.label,)) if isinstance(case.label, Path) else (case.label, ())
        annotated = () if case.annotated is None else (case.annotated,)
        # Fields that a benchmark's class adds may decide over its images, too.
        names = (entry.name for entry in fields(self) if entry.name not in ("cases", "path"))
        settings = (f"{name}={getattr(self, name)!r}" for name in names)
        states = file_states([*case.files, *files])
        return (case.name, case.index, label, *annotated, type(self).__name__, *settings, *states)

    def with_channels(self, names: Sequence[str]) -> Self:
        """Return the site with a federation's channels, in its order.

        Names are compared by `plain_name`. A channel that the site lacks is 0 after scaling. Images stay as
        they are where the federation or the site names no channels.
        """
        if not names or not self.channel_names:
            return self
        self.check_channels(names, "the federation's")
        return replace(self, federation_channels=tuple(names))

    def check_channels(self, names: Sequence[str], owner: str) -> None:
        """Check that the site has no other channels than a federation's, by `plain_name`."""
        known = set(map(plain_name, names))
        for name in self.channel_names:
            if plain_name(name) not in known:
                hint = "Name a channel alike at all sites; one site has to have them all."
                raise self.error(f"has the channel {name!r}, but {owner} are {', '.join(names)}", hint=hint)

    @property
    def partial(self) -> bool:
        """Return whether some class or voxel of a case may not be annotated."""
        return self.ignore is not None or any(case.annotated is not None for case in self.listed_cases)

    def annotated(self, *splits: str, in_all: bool = False) -> tuple[str, ...]:
        """Return the classes, without the background, that a case of some (or all) splits has annotated.

        With ``in_all``, every case must show a class in full, which no case with unknown voxels does.
        """
        cases = [case for split in splits or SPLITS for case in self.cases[split]]
        sets = [self.annotated_set(case, self.classes)[1:] for case in cases]
        if not sets or (in_all and self.ignore is not None):
            return ()
        chosen = map(all if in_all else any, zip(*sets, strict=True))
        return tuple(compress(self.classes[1:], chosen))

    def without_unlabelled(self) -> Self:
        """Return the site without the training cases that have nothing annotated."""
        training = tuple(case for case in self.cases["training"] if case.annotated != ())
        return replace(self, cases={**self.cases, "training": training})

    def with_classes(self, names: Sequence[str], sites: Sequence[SiteFolder] = ()) -> Self:
        """Return a site of segmentation with label maps of a federation's classes, background first.

        Names decide, whatever their order at the site. Partial ``sites`` of a federation share one code of
        the label maps.
        """
        known, site_names = ([plain_name(name) for name in n] for n in (names, self.classes))
        if not self.partial:
            others = known == site_names or {*known} != {*site_names}
            if self.task != "segmentation" or others or known[0] != site_names[0]:
                return self
            values = self.label_values or tuple(range(len(self.classes)))
            values = tuple(values[site_names.index(name)] for name in known)
            return replace(self, classes=tuple(names), label_values=values)
        for name in self.annotated():
            if plain_name(name) not in known[1:]:
                near = get_close_matches(plain_name(name), known[1:], 1)
                question = f" Did the site mean {names[known.index(near[0])]!r}?" if near else ""
                raise self.error(
                    f"has outlined {name!r}, but the federation's classes are {', '.join(names[1:])}",
                    hint=f"Write the federation's name in labels and in labelled.{question}",
                )
        if site_names[0] in known[1:]:
            raise self.error(
                f"has {self.classes[0]!r} as its lowest value, which stands for the background, and the "
                "federation has a class of that name",
                hint="Give the background the lowest value in labels and label maps.",
            )
        values = self.label_values or tuple(range(len(self.classes)))
        # The background is the first class, under any name.
        by_name = {**dict(zip(site_names, values, strict=True)), known[0]: values[0]}
        sites = sites or [self]
        cases = [case for site in sites for case in site.listed_cases]
        unknown = any(s.ignore is not None for s in sites) or any(case.annotated == () for case in cases)
        sets = [self.annotated_set(case, names) for case in cases]
        annotation = Annotation.of(len(names), sets, has_unknown=unknown)
        values = tuple(by_name.get(name, -1) for name in known)
        return replace(self, classes=tuple(names), label_values=values, annotation=annotation)

    @property
    def listed_cases(self) -> Iterator[Case]:
        """Yield the cases of all splits."""
        return (case for split in SPLITS for case in self.cases[split])

    @staticmethod
    def annotated_set(case: Case, classes: Sequence[str]) -> tuple[bool, ...]:
        """Return whether a case has annotated each class, by `plain_name`; true of the background."""
        if case.annotated is None:
            return (True,) * len(classes)
        annotated = {plain_name(name) for name in case.annotated}
        return (True, *(plain_name(name) in annotated for name in classes[1:]))

    @property
    def channel_places(self) -> tuple[int, ...]:
        """Return the federation's index of each channel of the site; empty where nothing moves."""
        channels, names = (tuple(map(plain_name, n)) for n in (self.channel_names, self.federation_channels))
        return () if channels == names or not names else tuple(names.index(name) for name in channels)

    @property
    def missing_channels(self) -> tuple[int, ...]:
        """Return the federation's indices of channels that the site lacks."""
        places = self.channel_places
        return tuple(i for i in range(len(self.federation_channels)) if places and i not in places)

    def limited(self, limit: int | None) -> Self:
        """Return the site with at most this many cases of each split, spread evenly over the list."""
        return replace(self, cases={split: spread(cases, limit) for split, cases in self.cases.items()})

    def error(self, problem: str, path: Path | None = None, *, hint: str = "") -> DataError:
        """Return an error that names the site and a file, by default its list."""
        return DataError(problem, site=self.name, path=path or self.path / self.listing, hint=hint)

    def reading(self, path: Path) -> AbstractContextManager[None]:
        """Turn any error of a reader into one that names site and file."""
        return reading(self.name, path)

    def check_splits(self) -> None:
        """Check that the splits make a training or an unseen site, and share no case and no patient."""
        empty = [split for split in SPLITS if not self.cases[split]]
        if len(empty) == len(SPLITS):
            raise self.error("lists no case")
        if empty and empty != ["training", "validation"]:
            hint = "A site trains with all three splits, or is tested only, with only test cases."
            raise self.error(f"the split {empty[0]!r} is empty", hint=hint)
        patients: dict[str, tuple[str, Case]] = {}
        for split in SPLITS:
            for case in (case for case in self.cases[split] if case.patient):
                other, first = patients.setdefault(case.patient, (split, case))
                if other != split:
                    problem = f"patient {own(case.patient)} is in {split}, and in {other} with "
                    raise self.error(f"{problem}{own(first.name)}", case.image, hint=_ONE_SPLIT)
        places: set[tuple[str, int | None]] = set()
        names: dict[str, Path] = {}
        for case in self.listed_cases:
            place = (os.path.realpath(case.image), case.index)
            if place in places:
                raise self.error("listed more than once", case.image, hint=_ONE_SPLIT)
            if case.name in names:
                problem = f"another case, {own(names[case.name])}, has the same name '{own(case.name)}'"
                raise self.error(problem, case.image, hint="Results are listed by name: rename one file.")
            places.add(place)
            names[case.name] = case.image


def is_own_data(sites: Iterable[SiteFolder]) -> bool:
    """Return whether no site is of a published data set or the phantom."""
    return not any(site.benchmark for site in sites)


def patient_name(entry: object = None) -> str:
    """Return a patient's name as text, from an entry of a list; empty for none."""
    return "" if entry is None else str(entry).strip()


def plain_name(name: str) -> str:
    """Return a name for comparison: without capitals, with single spaces for spaces, ``_`` and ``-``."""
    return " ".join(re.split(r"[\s_-]+", name.casefold()))


def by_patient(cases: Iterable[Case]) -> list[list[Case]]:
    """Group cases by patient, in the order of each patient's first case."""
    patients: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        patients.setdefault(case.owner, []).append(case)
    return list(patients.values())


def spread(cases: Sequence[T], limit: int | None) -> tuple[T, ...]:
    """Choose at most ``limit`` cases, evenly over a list that may be sorted by class."""
    if limit is None or limit >= len(cases):
        return tuple(cases)
    return tuple(cases[int(i * len(cases) / limit)] for i in range(limit))


def reading(site: str, path: Path) -> AbstractContextManager[None]:
    """Turn any error of a reader into one that names site and file."""

    def named(error: Exception) -> DataError:
        text = str(error) if isinstance(error, ReaderError) else first_line(error)
        hint = "Replace the file or leave the case out."
        return DataError(f"cannot be read as an image ({withheld(text)})", site=site, path=path, hint=hint)

    return translated(Exception, to=named)  # readers raise errors of any class


def shuffled(items: Sequence[T], *seeds: object) -> list[T]:
    """Shuffle items by a permutation that follows from some values, the same in every process."""
    order = np.random.default_rng(derive_seed(*seeds)).permutation(len(items))
    return [items[i] for i in order]


def split_by_class(
    site: str, cases: Sequence[Case], shares: tuple[float, float] = _SHARES
) -> dict[str, Sequence[Case]]:
    """Split each class by a permutation that depends only on the names of site and class."""
    split: dict[str, list[Case]] = {key: [] for key in SPLITS}
    for label in sorted({str(case.label) for case in cases}):
        images = [case for case in cases if case.label == label]
        drawn = shuffled(images, "split", site, label)
        first, second = (round(sum(shares[: k + 1]) * len(drawn)) for k in range(2))
        for key, part in zip(SPLITS, (drawn[:first], drawn[first:second], drawn[second:]), strict=True):
            split[key] += part
    return dict(split)


def split_patients(site: str, cases: Sequence[Case], seed: int = 0) -> dict[str, Sequence[Case]]:
    """Split patients 60/20/20 by a permutation that depends only on the site's name and a seed.

    Cases of one `Case.patient` stay together; a case without a name stands for a patient. A site with fewer
    than three patients is unseen: all are tested.
    """
    patients = by_patient(cases)
    if len(patients) < 3:
        return {"training": (), "validation": (), "test": tuple(cases)}
    drawn = shuffled(patients, "split", site, "patients", *([seed] if seed else []))
    held = max(1, round(_SHARES[1] * len(patients)))
    parts = (drawn[2 * held :], drawn[held : 2 * held], drawn[:held])
    return {split: [*chain(*part)] for split, part in zip(SPLITS, parts, strict=True)}
