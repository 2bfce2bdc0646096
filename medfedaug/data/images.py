"""Photographs in one folder per class, with published splits or a seeded one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from medfedaug.data.base import (
    SPLITS,
    Case,
    Listing,
    SiteFolder,
    check_below,
    patient_name,
)
from medfedaug.data.checks.duplicates import check_copies
from medfedaug.data.io.formats import format_of, is_photograph
from medfedaug.data.preparation.decoded_cache import decoded
from medfedaug.data.splits import split_by_class
from medfedaug.errors import DataError, own, warn, withheld
from medfedaug.utils.files import parse_json

# Of the published training lists: the first part trains, the rest validates (FedBN's and FedFA's protocol).
_TRAINING_SHARE = 0.6


class ImageFolder(SiteFolder):
    """A site's images, ``<site>/<class>/*``; `Case.label` is the name of the class.

    The splits are those of ``DIR/splits/<site>_train.json`` and ``<site>_test.json``, lists of
    ``[path, class]`` or ``[path, class, patient]``, relative to ``DIR``: the first 60 % of the training list
    train, with the other images of their patients, and the rest validates. Without such lists each class is
    split 60/20/20 by a permutation that depends on the site's name alone, and each image is a patient's only
    one.
    """

    task = "classification"
    listing = "splits"

    @classmethod
    def list_cases(cls, path: Path, name: str) -> Listing:
        classes = tuple(p.name for p in visible_folders(path) if class_cases(p, p.name))
        if not classes:
            raise DataError("no folder of a class", site=name, path=path)
        published = path.resolve().parent / "splits" / f"{name}_train.json"
        if published.exists():
            return Listing(classes, _published(name, path, published, classes))
        return Listing(classes, split_by_class(name, cases_of_classes(path, classes)))

    def check_files(self) -> int:
        """Check that every listed image exists and can be read, by the headers alone; all become RGB."""
        for case in self.listed_cases:
            self.check_image(case)
        check_copies([self])
        return 3

    def check_image(self, case: Case) -> None:
        """Check that a case's image exists and that its pixels' range is known."""
        if not case.image.is_file():
            raise self.error(
                "a listed image is missing", case.image, hint="Put the file there or take it out of the list."
            )
        with self.reading(case.image):
            format_of(case.image).check_photograph(case.image)

    def load_image(self, case: Case, intensity: str = "raw") -> torch.Tensor:
        """The image with values from 0 to 255, (3, H, W), or with ``"scale"`` as float32 in [0, 1].

        One of 8 bits is uint8. One channel of 16 bits is float32, divided by 257 so that the full range is 0
        to 255; of 16 bits in colour Pillow reads the upper 8.
        """
        image = decoded("photograph", case.files, lambda: self._pixels(case))
        return image / 255 if intensity == "scale" else image

    def _pixels(self, case: Case) -> torch.Tensor:
        with self.reading(case.image):
            return torch.as_tensor(format_of(case.image).read_photograph(case.image))


def _published(
    site: str, path: Path, train_list: Path, classes: tuple[str, ...]
) -> dict[str, Sequence[Case]]:
    root = path.resolve().parent
    lists = []
    for file in (train_list, train_list.with_name(f"{site}_test.json")):
        try:
            entries: Any = parse_json(file.read_text(encoding="utf-8"))
            lists.append([_listed(root, *entry) for entry in entries])
            for image, label, *_ in entries:
                _check_entry(root, path.resolve(), str(image), str(label), site, file)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"not a list of [path, class] or [path, class, patient] ({withheld(error)})",
                site=site,
                path=file,
            ) from error
        unknown = sorted({str(case.label) for case in lists[-1]} - set(classes))
        if unknown:
            raise DataError(
                f"names the class '{own(unknown[0])}', and there is no such folder",
                site=site,
                path=file,
                hint=f"The folders are {own(', '.join(classes))}.",
            )
    split = published_split(*lists)
    _warn_of_order(site, train_list, split)
    return split


def _listed(root: Path, image: str, label: object, patient: object = None) -> Case:
    return Case(str(image), root / image, str(label), patient=patient_name(patient))


def _warn_of_order(site: str, train_list: Path, split: dict[str, Sequence[Case]]) -> None:
    """Warn where a list's order leaves a class out of training or validation, as one sorted by class does."""
    both = Counter(case.label for name in SPLITS[:2] for case in split[name])
    for name in SPLITS[:2]:
        there = {case.label for case in split[name]}
        lacking = sorted(str(label) for label, count in both.items() if count > 1 and label not in there)
        if lacking:
            warn(
                f"{name} has no image of {own(', '.join(lacking))}: the first 60 % of the list train, "
                "and the rest validates",
                site=site,
                path=train_list,
                hint="Shuffle the list.",
            )
            return


def _check_entry(root: Path, folder: Path, image: str, label: str, site: str, listing: Path) -> None:
    check_below(root, image, site, listing)
    if os.path.isabs(image):  # is meant
        return
    place = Path(os.path.normpath(root / image))
    if not place.is_relative_to(folder):
        raise DataError(f"names {own(image)}, which is not below {own(folder)}", site=site, path=listing)
    below = place.relative_to(folder).parts
    if len(below) == 2 and below[0] != label:
        raise DataError(
            f"names {own(image)} as '{own(label)}', not as '{own(below[0])}'", site=site, path=listing
        )


def published_split(train: Sequence[Case], test: Sequence[Case]) -> dict[str, Sequence[Case]]:
    """The first 60 % of a published training list train, the rest validates.

    A patient whose images lie on both sides trains with all of them.
    """
    boundary = int(_TRAINING_SHARE * len(train))
    whose = {case.patient for case in train[:boundary] if case.patient}
    after = train[boundary:]
    training = [*train[:boundary], *(case for case in after if case.patient in whose)]
    return {"training": training, "validation": [c for c in after if c.patient not in whose], "test": test}


def visible_folders(path: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones."""
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def cases_of_classes(folder: Path, classes: Iterable[str]) -> list[Case]:
    """The images in folders of classes as cases, class by class."""
    return [case for label in classes for case in class_cases(folder / label, label)]


def class_cases(folder: Path, label: str) -> list[Case]:
    """The images of a folder as cases of one class, sorted by name."""
    files = sorted(p for p in folder.iterdir() if is_photograph(p))
    return [Case(f"{label}/{file.name}", file, label) for file in files]
