"""``dataset.json``: MONAI's decathlon layout, with several files an image and the patient's name.

``{"labels": {"0": "background", "1": "lesion"}, "training": [...], "validation": [...], "test": [...]}``;
each case is ``{"image": path or list of paths, "label": path, "patient": name}``, relative to the file. The
keys of ``labels`` are the values of the classes in the label maps; background is the lowest.

``"labelled": ["lesion"]`` names the classes that the site, or in a row the case, has annotated; a row without
``label`` has none. ``"ignore": 255`` is the value of voxels of unknown class.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfedaug.data.base import SPLITS, Case, Listing, SiteFolder, patient_name, plain_name
from medfedaug.data.io.formats import without_suffix
from medfedaug.errors import DataError, data_errors, own
from medfedaug.utils.files import parse_json

UNNAMED = ("background", "foreground")  # the classes where ``dataset.json`` names none

LARGEST_VALUE = 2**16 - 1  # the largest value that may stand for a class in a label map

_WRONG_FORM = (AttributeError, KeyError, TypeError, ValueError)  # errors of using JSON of another form

IGNORE = "ignore"  # the key, and nnU-Net's label, of voxels of unknown class

LABELLED = "labelled"
"""The key of the classes that a site, or a row of its list, has annotated; also in ``results.json``."""

LAYOUTS = (("imagesTr", "labelsTr"), ("images", "labels"), ("images", "masks"), ("image", "label"))
"""Names of the folders of images and label maps, for which `medfedaug.data.layouts` lists the cases."""


def find_layout(folder: Path) -> tuple[str, str] | None:
    """Return the names of the folders of images and label maps in a folder, or ``None``."""
    return next((pair for pair in LAYOUTS if all((folder / part).is_dir() for part in pair)), None)


def named_classes(site: SiteFolder) -> tuple[str, ...]:
    """Return the classes that a site names, without the background; none without names and outlines."""
    return site.classes[1:] if site.classes != UNNAMED or site.annotated() else ()


def unseen_note(names: Sequence[str], where: str = "no label map") -> str:
    """Return a sentence on classes that a site claims to have outlined, and that its label maps lack."""
    return (
        f"{where} shows {', '.join(names)}: all voxels are learned as other classes; where nobody outlined "
        f"{'it' if len(names) == 1 else 'them'}, list the outlined classes under {LABELLED!r} in dataset.json"
    )


def read_listing(folder: Path, site: str) -> Listing:
    """Read the classes and cases of ``folder/dataset.json``."""
    file = _DatasetFile(folder, site)
    cases = {split: file.split(split) for split in SPLITS}
    names = file.channels()
    classes, values, ignore = file.labels()
    file.check_annotated(classes, cases)
    return Listing(classes, _with_unique_names(folder, cases), names, values, ignore)


def read_test_images(folder: Path, site: str, classes: Sequence[str]) -> Listing:
    """Read the test cases of ``folder/dataset.json``, whose rows may be paths, without their labels."""
    file = _DatasetFile(folder, site)
    cases = {"test": file.split("test", labelled=False)}
    return Listing(tuple(classes), _with_unique_names(folder, cases), file.channels())


class _DatasetFile:
    """A site's ``dataset.json``; methods raise `DataError`, naming site and file."""

    def __init__(self, folder: Path, site: str) -> None:
        self.path, self.site = folder / "dataset.json", site
        with self._errors("not readable as JSON", OSError, ValueError, hint="Write it in UTF-8."):
            self.content = parse_json(self.path.read_text(encoding="utf-8"))
        if not isinstance(self.content, dict):
            raise self.error("not a JSON object")

    def error(self, problem: str, hint: str = "") -> DataError:
        return DataError(problem, site=self.site, path=self.path, hint=hint)

    def _errors(self, problem: str, *kinds: type[Exception], hint: str = "") -> AbstractContextManager[None]:
        return data_errors(problem, *kinds, site=self.site, path=self.path, hint=hint)

    def split(self, name: str, labelled: bool = True) -> Sequence[Case]:
        listed = self.content.get(name)
        if not listed:
            return ()
        from monai.data import load_decathlon_datalist

        form = "{'image': ..., 'label': ...}" if labelled else "{'image': ...}"
        with self._errors(f"the split {name!r} is not a list of {form}", *_WRONG_FORM):
            items = load_decathlon_datalist(self.path, is_segmentation=True, data_list_key=name)
            annotated = _names(self.content.get(LABELLED)) if labelled else None
            rows = zip(items, listed, strict=True)
            return [_read_case(item, row, labelled, annotated) for item, row in rows]

    def check_annotated(self, classes: Sequence[str], cases: dict[str, Sequence[Case]]) -> None:
        known = {plain_name(name) for name in classes[1:]}
        listed = [(split, case) for split in SPLITS for case in cases[split]]
        unlabelled = [(split, case) for split, case in listed if not case.label]
        # Without `labelled`, a row without a label among others is an error.
        if unlabelled and len(unlabelled) < len(listed) and LABELLED not in self.content:
            split, case = unlabelled[0]
            raise self.error(
                f"the split {split!r} lists {own(case.image.name)} without 'label', and others have one",
                'Add its label map; or write "labelled": [...] with the classes that the label maps have, '
                "and such a case counts as one without outlines.",
            )
        for case, name in ((c, name) for _, c in listed for name in c.annotated or ()):
            if plain_name(name) not in known:
                named = f"{LABELLED!r} of {own(case.image.name)} names {name!r}"
                hint = f"Add {name!r} with its value to 'labels', or spell it as there."
                raise self.error(f"{named}, and 'labels' has {', '.join(classes[1:])}", hint)

    def labels(self) -> tuple[tuple[str, ...], tuple[int, ...], int | None]:
        """Return the names of the classes, their values (empty for 0, 1, 2, ...), and the ignored value."""
        ignore = self.content.get(IGNORE)
        classes = self._mapping("labels", "values of label maps", dict(enumerate(UNNAMED)))
        # nnU-Net lists the ignored value among the classes.
        listed = [value for value, text in classes.items() if plain_name(text) == IGNORE]
        ignore = listed[0] if ignore is None and listed else ignore
        classes = {value: text for value, text in classes.items() if value not in listed}
        names_differ = len(set(map(plain_name, classes.values()))) == len(classes)
        if len(classes) < 2 or not names_differ or not all(0 <= v <= LARGEST_VALUE for v in classes):
            raise self.error(
                f"'labels' has {', '.join(f'{value} for {text!r}' for value, text in classes.items())}",
                f"Two classes or more, with different names and whole numbers from 0 to {LARGEST_VALUE}.",
            )
        if ignore is not None and (type(ignore) is not int or ignore in classes or {*listed} - {ignore}):
            raise self.error(
                f"{IGNORE!r} is {ignore!r}, and 'labels' has {self.content.get('labels')}",
                "Give unknown voxels one whole number that is not a class, such as 255.",
            )
        values = tuple(sorted(classes))
        names = tuple(classes[value] for value in values)
        return names, () if values == (*range(len(values)),) else values, ignore

    def channels(self) -> tuple[str, ...]:
        """Return the channels' names, from nnU-Net's ``channel_names`` or the decathlon's ``modality``."""
        names: tuple[str, ...] = ()
        for key in ("channel_names", "modality"):
            if key not in self.content:
                continue
            channels = self._mapping(key, "channels' indices")
            listed = tuple(channels[index] for index in sorted(channels))
            names_differ = len(set(map(plain_name, listed))) == len(listed)
            if not listed or not names_differ or sorted(channels) != [*range(len(listed))]:
                raise self.error(f"{key!r} is {channels}", "Give 0, 1, 2, ... each a name of its own.")
            if names not in ((), listed):
                raise self.error("'channel_names' and 'modality' differ")
            names = listed
        return names

    def _mapping(self, key: str, numbers: str, default: Any = None) -> dict[int, str]:
        with self._errors(f"{key!r} does not map the {numbers} to names", *_WRONG_FORM):
            return {int(number): str(text) for number, text in self.content.get(key, default).items()}


def _names(value: Any) -> tuple[str, ...] | None:
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise ValueError(f"{LABELLED!r} must be a list of names of classes")
    return None if value is None else tuple(value)


def _read_case(item: dict[str, Any], row: Any, labelled: bool, annotated: tuple[str, ...] | None) -> Case:
    """Build a case from a row, whose image is one file or a list of files."""
    listed = item["image"]
    first, *others = [Path(file) for file in (listed if isinstance(listed, list) else [listed])]
    label: Path | str = ""
    if labelled:
        row_names = _names(row.get(LABELLED))
        label = Path(item["label"]) if row.get("label") else ""
        annotated = (annotated if row_names is None else row_names) if label else ()
    # From the row: MONAI replaces a text by a path where a file or folder of that name exists.
    patient = patient_name(row.get("patient") if isinstance(row, dict) else None)
    name = without_suffix(first.name)
    return Case(name, first, label, patient=patient, others=tuple(others), annotated=annotated)


def _with_unique_names(folder: Path, cases: dict[str, Sequence[Case]]) -> dict[str, Sequence[Case]]:
    """Name cases by their files, or by their paths if file names repeat, as in ``<patient>/image.nii.gz``."""
    names = [case.name for split in cases.values() for case in split]
    if len(set(names)) == len(names):
        return cases
    return {
        split: [replace(case, name=without_suffix(os.path.relpath(case.image, folder))) for case in listed]
        for split, listed in cases.items()
    }
