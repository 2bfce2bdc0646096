"""Photographs in one folder per class, with published splits or a seeded one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medfedaug.data.base import SPLITS, Case, Listing, SiteFolder, patient_name, split_by_class
from medfedaug.data.checks import check_copies
from medfedaug.data.io.formats import is_photograph
from medfedaug.data.io.photographs import check_photograph, read_photograph
from medfedaug.data.preparation.cache import decoded
from medfedaug.errors import DataError, data_errors, own, warn
from medfedaug.utils.files import parse_json

if TYPE_CHECKING:
    import torch

# Of a published training list: the first part trains, the rest validates (FedBN's and FedFA's protocol).
_TRAINING_SHARE = 0.6


class ImageFolder(SiteFolder):
    """Images of a site, ``<site>/<class>/*``; `Case.label` is the name of the class.

    ``DIR/splits/<site>_train.json`` and ``<site>_test.json`` list ``[path, class]`` or
    ``[path, class, patient]``, relative to ``DIR``: the first 60 % of the training list train, with the other
    images of their patients, and the rest validates. Without lists, each class is split 60/20/20 by a
    permutation that depends only on the site's name, and each image stands for a patient.
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
        """Check by headers that every listed image can be read; all become RGB."""
        for case in self.listed_cases:
            self.check_image(case)
        check_copies([self])
        return 3

    def check_image(self, case: Case) -> None:
        """Check that a case's image exists and that its pixels' range is known."""
        with self.reading(case.image):
            check_photograph(case.image)

    def check_pixels(self, case: Case) -> None:
        """Decode a case's image, without PyTorch."""
        with self.reading(case.image):
            read_photograph(case.image)

    def load_image(self, case: Case, intensity: str = "raw") -> torch.Tensor:
        """Return the image with values from 0 to 255, (3, H, W), or with ``"scale"`` as float32 in [0, 1].

        An image of 8 bits is uint8. One channel of 16 bits is float32, divided by 257 to the range 0 to 255;
        of 16 bits in colour Pillow reads the upper 8.
        """
        image = decoded("photograph", case.files, lambda: self._pixels(case))
        return image / 255 if intensity == "scale" else image

    def _pixels(self, case: Case) -> torch.Tensor:
        import torch

        with self.reading(case.image):
            return torch.as_tensor(read_photograph(case.image))


def _published(
    site: str, path: Path, train_list: Path, classes: tuple[str, ...]
) -> dict[str, Sequence[Case]]:
    root = path.resolve().parent
    files = (train_list, train_list.with_name(f"{site}_test.json"))
    split = published_split(*(_listed(site, root, file, classes) for file in files))
    _warn_of_order(site, train_list, split)
    return split


def _listed(site: str, root: Path, file: Path, classes: tuple[str, ...]) -> list[Case]:
    """Read a published list, relative to ``root``."""
    form = "not a list of [path, class] or [path, class, patient]"
    with data_errors(form, OSError, ValueError, TypeError, site=site, path=file):
        cases = [
            Case(image, root / image, str(label), patient=patient_name(*patient))
            for image, label, *patient in parse_json(file.read_text(encoding="utf-8"))
        ]
    if unknown := sorted({str(case.label) for case in cases} - set(classes)):
        problem = f"names the class '{own(unknown[0])}', and there is no such folder"
        hint = f"The folders are {own(', '.join(classes))}."
        raise DataError(problem, site=site, path=file, hint=hint)
    return cases


def _warn_of_order(site: str, train_list: Path, split: dict[str, Sequence[Case]]) -> None:
    """Warn where the list's order, such as by class, leaves a class out of training or validation."""
    numbers = Counter(case.label for name in SPLITS[:2] for case in split[name])
    for name in SPLITS[:2]:
        labels = {case.label for case in split[name]}
        missing = sorted(str(label) for label, n in numbers.items() if n > 1 and label not in labels)
        if missing:
            problem = f"{name} has no image of {own(', '.join(missing))}"
            rule = "the first 60 % of the list train, and the rest validates"
            warn(f"{problem}: {rule}", site=site, path=train_list, hint="Shuffle the list.")
            return


def published_split(train: Sequence[Case], test: Sequence[Case]) -> dict[str, Sequence[Case]]:
    """Split a published training list: the first 60 % train, the rest validates.

    A patient with images in both parts trains with all of them.
    """
    boundary = int(_TRAINING_SHARE * len(train))
    patients = {case.patient for case in train[:boundary] if case.patient}
    rest = train[boundary:]
    training = [*train[:boundary], *(case for case in rest if case.patient in patients)]
    validation = [case for case in rest if case.patient not in patients]
    return {"training": training, "validation": validation, "test": test}


def visible_folders(path: Path) -> list[Path]:
    """List the folders in a folder, sorted, without hidden ones."""
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def cases_of_classes(folder: Path, classes: Iterable[str]) -> list[Case]:
    """List the images in folders of classes as cases, class by class."""
    return [case for label in classes for case in class_cases(folder / label, label)]


def class_cases(folder: Path, label: str) -> list[Case]:
    """List the images of a folder as cases of one class, sorted by name."""
    files = sorted(p for p in folder.iterdir() if is_photograph(p))
    return [Case(f"{label}/{file.name}", file, label) for file in files]
