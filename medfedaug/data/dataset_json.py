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
from medfedaug.data.io.formats import image_suffix
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
    """The classes and cases that ``folder/dataset.json`` names.

    Raises:
        DataError: naming site and file.
    """
    listing, content = _read_object(folder, site)
    cases = {split: _read_split(listing, site, content, split) for split in SPLITS}
    names = _read_channels(listing, site, content)
    classes, values, ignore = _read_labels(listing, site, content)
    _check_annotated(listing, site, classes, cases, said=LABELLED in content)
    return Listing(classes, _told_apart(folder, cases), names, values, ignore)


def read_test_images(folder: Path, site: str, classes: Sequence[str]) -> Listing:
    """The test cases that ``folder/dataset.json`` names, without their labels, which need not be there.

    A case may be the path of its image alone, as decathlon's test cases are.

    Args:
        folder: the site's.
        site: its name, for messages.
        classes: of the listing that is returned; those of the file are not looked at.

    Raises:
        DataError: naming site and file.
    """
    listing, content = _read_object(folder, site)
    cases = {"test": _read_split(listing, site, content, "test", labelled=False)}
    return Listing(tuple(classes), _told_apart(folder, cases), _read_channels(listing, site, content))


def _read_object(folder: Path, site: str) -> tuple[Path, dict[str, Any]]:
    listing = folder / "dataset.json"
    if not listing.is_file():
        there = os.path.lexists(listing)
        raise DataError(
            "its dataset.json is no file" if there else "there is no dataset.json",
            site=site,
            path=folder,
            hint="It lists the cases in MONAI's decathlon style.",
        )
    try:
        content = parse_json(listing.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"not readable as JSON ({withheld(error)})", site=site, path=listing, hint="Write it in UTF-8."
        ) from error
    if not isinstance(content, dict):
        raise DataError("not a JSON object", site=site, path=listing)
    return listing, content


def _read_split(
    listing: Path, site: str, content: dict[str, Any], split: str, labelled: bool = True
) -> Sequence[Case]:
    if not content.get(split):
        return ()
    from monai.data import load_decathlon_datalist

    try:
        items = load_decathlon_datalist(listing, is_segmentation=True, data_list_key=split)
        rows = zip(items, content[split], strict=True)
        annotated = _names(content.get(LABELLED)) if labelled else None
        cases = [_read_case(item, row, labelled, annotated) for item, row in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        form = "{'image': ..., 'label': ...}" if labelled else "{'image': ...}"
        raise DataError(
            f"the split {split!r} is not a list of {form} ({withheld(error)})",
            site=site,
            path=listing,
        ) from error
    for row in content[split]:
        image = row["image"] if isinstance(row, dict) else row
        files = [*image] if isinstance(image, list) else [image]
        for listed in (*files, *([row["label"]] if labelled and "label" in row else [])):
            check_below(listing.parent, str(listed), site, listing)
    return cases


def _patient(row: Any) -> str:
    """Return the patient of a row of the list, as text; empty where the row has none.

    Of the list as written: MONAI's reader takes any text for a path where a file or folder of that name is
    there, as one is for the empty text.
    """
    return patient_name(row.get("patient") if isinstance(row, dict) else None)


def _names(value: Any) -> tuple[str, ...] | None:
    """Names of classes, where they are given."""
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise ValueError(f"{LABELLED!r} is a list of names of classes")
    return None if value is None else tuple(value)


def _check_annotated(
    listing: Path, site: str, classes: Sequence[str], cases: dict[str, Sequence[Case]], *, said: bool
) -> None:
    """Check the classes that cases have annotated.

    Args:
        listing: the file.
        site: its name.
        classes: of the site.
        cases: by split.
        said: whether the file says what the site has annotated: otherwise one row without a label is a slip.
    """
    known = {plain_name(name) for name in classes[1:]}
    listed = [case for split in SPLITS for case in cases[split]]
    without = [(split, case) for split in SPLITS for case in cases[split] if not case.label]
    if without and len(without) < len(listed) and not said:
        raise DataError(
            f"the split {without[0][0]!r} lists {own(without[0][1].image.name)} without 'label', and others "
            "have one",
            site=site,
            path=listing,
            hint='Add its label map; or write "labelled": [...] with the classes that the label maps have, '
            "and such a case counts as one without outlines.",
        )
    for case in listed:
        for name in case.annotated or ():
            if plain_name(name) not in known:
                raise DataError(
                    f"{LABELLED!r} of {own(case.image.name)} names {name!r}, and 'labels' has "
                    f"{', '.join(classes[1:])}",
                    site=site,
                    path=listing,
                    hint=f"Add {name!r} with its value to 'labels', or spell it as there.",
                )


def _read_case(item: dict[str, Any], row: Any, labelled: bool, annotated: tuple[str, ...] | None) -> Case:
    """A case of the list, whose image is one file or a list of them.

    Args:
        item: with the paths of its files.
        row: as written.
        labelled: whether cases have label maps.
        annotated: the classes that the site has annotated.
    """
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
        label = Path(item["label"]) if "label" in row else ""
        annotated = (annotated if given is None else given) if label else ()
    return Case(
        _without_suffix(first.name),
        first,
        label,
        patient=_patient(row),
        others=tuple(others),
        annotated=annotated,
    )


def _read_labels(
    listing: Path, site: str, content: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[int, ...], int | None]:
    """The names of the classes, their values where these are not 0, 1, 2, ..., and that of unknown voxels."""
    labels = content.get("labels", dict(enumerate(UNNAMED)))
    ignore = content.get(IGNORE)
    try:
        named = {int(value): str(text) for value, text in labels.items()}
        # nnU-Net lists it among the classes.
        listed = [value for value, text in named.items() if plain_name(text) == IGNORE]
        ignore = listed[0] if listed and ignore is None else ignore
        labels = {value: text for value, text in named.items() if value not in listed}
        named = dict(labels)
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"'labels' does not map the values of label maps to names ({withheld(error)})",
            site=site,
            path=listing,
        ) from error
    if len(named) < max(2, len(labels)) or not all(0 <= value <= LARGEST_VALUE for value in named):
        raise DataError(
            f"'labels' has the values {sorted(map(str, labels))}",
            site=site,
            path=listing,
            hint=f"Two classes or more, each with a whole number from 0 to {LARGEST_VALUE} of its own.",
        )
    if len(set(named.values())) < len(named):
        raise DataError("'labels' has two classes of one name", site=site, path=listing)
    whole = isinstance(ignore, int) and not isinstance(ignore, bool) and 0 <= ignore <= LARGEST_VALUE
    if ignore is not None and (not whole or ignore in named):
        taken = f", the value of {named[ignore]!r}" if whole else ""
        raise DataError(
            f"{IGNORE!r} is {ignore!r}{taken}",
            site=site,
            path=listing,
            hint=f"Give unknown voxels a whole number up to {LARGEST_VALUE} that is no class, such as 255.",
        )
    values = tuple(sorted(named))
    names = tuple(named[value] for value in values)
    return names, () if values == (*range(len(values)),) else values, ignore


def _read_channels(listing: Path, site: str, content: dict[str, Any]) -> tuple[str, ...]:
    """The names of the channels, as nnU-Net (``channel_names``) or decathlon (``modality``) writes them."""
    found: dict[str, tuple[str, ...]] = {}
    for key in ("channel_names", "modality"):
        if key not in content:
            continue
        try:
            named = {int(index): str(text) for index, text in content[key].items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(
                f"{key!r} does not map the channels' indices to names ({withheld(error)})",
                site=site,
                path=listing,
            ) from error
        if sorted(named) != list(range(len(named))) or not named:
            raise DataError(
                f"{key!r} has the indices {sorted(named)}",
                site=site,
                path=listing,
                hint="They count 0, 1, 2, ...",
            )
        found[key] = tuple(named[index] for index in range(len(named)))
        if len(set(map(plain_name, found[key]))) < len(named):
            raise DataError(f"{key!r} has two channels of one name", site=site, path=listing)
    if len(set(found.values())) > 1:
        raise DataError("'channel_names' and 'modality' differ", site=site, path=listing)
    return next(iter(found.values()), ())


def _told_apart(folder: Path, cases: dict[str, Sequence[Case]]) -> dict[str, Sequence[Case]]:
    """Name cases by their files, or by their paths if file names repeat, as in ``<patient>/image.nii.gz``."""
    names = [case.name for split in cases.values() for case in split]
    if len(set(names)) == len(names):
        return cases
    return {
        split: [replace(case, name=_without_suffix(os.path.relpath(case.image, folder))) for case in listed]
        for split, listed in cases.items()
    }


def _without_suffix(name: str) -> str:
    return name[: len(name) - len(image_suffix(name))]
