"""``dataset.json``: MONAI's decathlon layout, with several files an image and the patient's name.

``{"labels": {"0": "background", "1": "lesion"}, "training": [...], "validation": [...], "test": [...]}``;
each case is ``{"image": path or list of paths, "label": path, "patient": name}``, relative to the file. The
keys of ``labels`` are the values of the classes in the label maps; background is the lowest.

``"labelled": ["lesion"]`` names the classes that the site has annotated, in a row those of its case; a row
without ``label`` has none. ``"ignore": 255`` is the value of voxels of which nobody knows the class.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfedaug.data.base import SPLITS, Case, Listing, SiteFolder, check_below, patient_name, plain_name
from medfedaug.data.io.formats import without_suffix
from medfedaug.errors import DataError, own, withheld
from medfedaug.utils.files import parse_json

UNNAMED = ("background", "foreground")
"""The classes where ``dataset.json`` names none."""

LARGEST_VALUE = 2**16 - 1
"""The largest value that may stand for a class in a label map."""

IGNORE = "ignore"
"""The key, and nnU-Net's label, of voxels of which nobody knows the class."""

LABELLED = "labelled"
"""The key of the classes that a site, or a row of its list, has annotated; also in ``results.json``."""


def named_classes(site: SiteFolder) -> tuple[str, ...]:
    """The structures that a site names: none where it has no outlines, and its file no names."""
    return site.classes[1:] if site.classes != UNNAMED or site.annotated() else ()


def read_listing(folder: Path, site: str) -> Listing:
    """The classes and cases that ``folder/dataset.json`` names."""
    read = _List(folder, site)
    cases = {split: read.split(split) for split in SPLITS}
    names = read.channels()
    classes, values, ignore = read.labels()
    read.check_annotated(classes, cases)
    return Listing(classes, _told_apart(folder, cases), names, values, ignore)


def read_test_images(folder: Path, site: str, classes: Sequence[str]) -> Listing:
    """The test cases that ``folder/dataset.json`` names, also as paths of images alone, without their labels.

    Raises:
        DataError: naming site and file.
    """
    read = _List(folder, site)
    cases = {"test": read.split("test", labelled=False)}
    return Listing(tuple(classes), _told_apart(folder, cases), read.channels())


class _List:
    """A site's ``dataset.json``; methods raise `DataError`, naming site and file."""

    def __init__(self, folder: Path, site: str) -> None:
        self.path, self.site = folder / "dataset.json", site
        if not self.path.is_file():
            there = os.path.lexists(self.path)
            raise DataError(
                "its dataset.json is no file" if there else "there is no dataset.json",
                site=site,
                path=folder,
                hint="It lists the cases in MONAI's decathlon style.",
            )
        try:
            self.content = parse_json(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.error(f"not readable as JSON ({withheld(error)})", "Write it in UTF-8.") from error
        if not isinstance(self.content, dict):
            raise self.error("not a JSON object")

    def error(self, problem: str, hint: str = "") -> DataError:
        return DataError(problem, site=self.site, path=self.path, hint=hint)

    def split(self, name: str, labelled: bool = True) -> Sequence[Case]:
        """Read the cases of a split, with or without their label maps."""
        listed = self.content.get(name)
        if not listed:
            return ()
        from monai.data import load_decathlon_datalist

        try:
            items = load_decathlon_datalist(self.path, is_segmentation=True, data_list_key=name)
            annotated = _names(self.content.get(LABELLED)) if labelled else None
            cases = [
                _read_case(item, row, labelled, annotated) for item, row in zip(items, listed, strict=True)
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            form = "{'image': ..., 'label': ...}" if labelled else "{'image': ...}"
            raise self.error(f"the split {name!r} is not a list of {form} ({withheld(error)})") from error
        for row in listed:
            image = row["image"] if isinstance(row, dict) else row
            files = [*image] if isinstance(image, list) else [image]
            for file in (*files, *([row["label"]] if labelled and row.get("label") else [])):
                check_below(self.path.parent, str(file), self.site, self.path)
        return cases

    def check_annotated(self, classes: Sequence[str], cases: dict[str, Sequence[Case]]) -> None:
        """Check the classes that cases, by split, have annotated."""
        known = {plain_name(name) for name in classes[1:]}
        listed = [(split, case) for split in SPLITS for case in cases[split]]
        without = [(split, case) for split, case in listed if not case.label]
        # Otherwise one row without a label is a slip.
        if without and len(without) < len(listed) and LABELLED not in self.content:
            raise self.error(
                f"the split {without[0][0]!r} lists {own(without[0][1].image.name)} without 'label', and "
                "others have one",
                'Add its label map; or write "labelled": [...] with the classes that the label maps have, '
                "and such a case counts as one without outlines.",
            )
        for _, case in listed:
            for name in case.annotated or ():
                if plain_name(name) not in known:
                    raise self.error(
                        f"{LABELLED!r} of {own(case.image.name)} names {name!r}, and 'labels' has "
                        f"{', '.join(classes[1:])}",
                        f"Add {name!r} with its value to 'labels', or spell it as there.",
                    )

    def labels(self) -> tuple[tuple[str, ...], tuple[int, ...], int | None]:
        """The names of the classes, their values where not 0, 1, 2, ..., and the value of unknown voxels."""
        ignore = self.content.get(IGNORE)
        named = self._named("labels", "values of label maps", dict(enumerate(UNNAMED)))
        # nnU-Net lists it among the classes.
        listed = [value for value, text in named.items() if plain_name(text) == IGNORE]
        if listed and ignore not in (None, listed[0]):
            raise self.error(f"{IGNORE!r} is {ignore!r}, and its label of that name is {listed[0]}")
        ignore = listed[0] if listed else ignore
        named = {value: text for value, text in named.items() if value not in listed}
        if len(named) < 2 or not all(0 <= value <= LARGEST_VALUE for value in named):
            raise self.error(
                f"'labels' has the values {sorted(map(str, named))}",
                f"Two classes or more, each with a whole number from 0 to {LARGEST_VALUE} of its own.",
            )
        if len(set(map(plain_name, named.values()))) < len(named):
            raise self.error("'labels' has two classes of one name")
        whole = isinstance(ignore, int) and not isinstance(ignore, bool) and 0 <= ignore <= LARGEST_VALUE
        if ignore is not None and (not whole or ignore in named):
            taken = f", the value of {named[ignore]!r}" if whole else ""
            raise self.error(
                f"{IGNORE!r} is {ignore!r}{taken}",
                f"Give unknown voxels a whole number up to {LARGEST_VALUE} that is no class, such as 255.",
            )
        values = tuple(sorted(named))
        names = tuple(named[value] for value in values)
        return names, () if values == (*range(len(values)),) else values, ignore

    def channels(self) -> tuple[str, ...]:
        """The names of the channels, as in nnU-Net (``channel_names``) or the decathlon (``modality``)."""
        found: dict[str, tuple[str, ...]] = {}
        for key in ("channel_names", "modality"):
            if key not in self.content:
                continue
            named = self._named(key, "channels' indices")
            if sorted(named) != list(range(len(named))) or not named:
                raise self.error(f"{key!r} has the indices {sorted(named)}", "They count 0, 1, 2, ...")
            found[key] = tuple(named[index] for index in range(len(named)))
            if len(set(map(plain_name, found[key]))) < len(named):
                raise self.error(f"{key!r} has two channels of one name")
        if len(set(found.values())) > 1:
            raise self.error("'channel_names' and 'modality' differ")
        return next(iter(found.values()), ())

    def _named(self, key: str, what: str, otherwise: Any = None) -> dict[int, str]:
        """The names that an entry has by number."""
        try:
            return {int(number): str(text) for number, text in self.content.get(key, otherwise).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise self.error(f"{key!r} does not map the {what} to names ({withheld(error)})") from error


def _names(value: Any) -> tuple[str, ...] | None:
    """Names of classes, where they are given."""
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise ValueError(f"{LABELLED!r} must be a list of names of classes")
    return None if value is None else tuple(value)


def _read_case(item: dict[str, Any], row: Any, labelled: bool, annotated: tuple[str, ...] | None) -> Case:
    """A case of the list, whose image is one file or a list of them."""
    listed = item["image"]
    files = [Path(file) for file in (listed if isinstance(listed, list) else [listed])]
    if not files:
        raise ValueError("an image has no file")
    first, *others = files
    if len({*files}) < len(files):
        raise ValueError(f"the image {first.name} has a file twice")
    label: Path | str = ""
    if labelled:
        given = _names(row.get(LABELLED))
        label = Path(item["label"]) if row.get("label") else ""
        annotated = (annotated if given is None else given) if label else ()
    # As written: MONAI's reader takes any text for a path where a file or folder of that name is there, as
    # one is for the empty text.
    patient = patient_name(row.get("patient") if isinstance(row, dict) else None)
    name = without_suffix(first.name)
    return Case(name, first, label, patient=patient, others=tuple(others), annotated=annotated)


def _told_apart(folder: Path, cases: dict[str, Sequence[Case]]) -> dict[str, Sequence[Case]]:
    """Name cases by their files, or by their paths if file names repeat, as in ``<patient>/image.nii.gz``."""
    names = [case.name for split in cases.values() for case in split]
    if len(set(names)) == len(names):
        return cases
    return {
        split: [replace(case, name=without_suffix(os.path.relpath(case.image, folder))) for case in listed]
        for split, listed in cases.items()
    }
