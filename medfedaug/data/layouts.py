"""Finds images and label maps in common layouts of folders, and proposes a ``dataset.json``.

Read as they are: nnU-Net's and the decathlon's ``imagesTr`` and ``labelsTr`` (with ``imagesTs`` and
``labelsTs`` where test cases have label maps), and ``images`` beside ``labels`` or ``masks``. An image is a
file, a folder with one file or one DICOM series at any depth, or, as nnU-Net has it, one file per channel:
``NAME_0000``, ... Nothing here needs PyTorch, and a folder without DICOM needs no pydicom.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medfedaug.data.base import SPLITS, Case, by_patient, plain_name
from medfedaug.data.checks.site_checks import check_classes
from medfedaug.data.dataset_json import IGNORE, LARGEST_VALUE, UNNAMED
from medfedaug.data.io.formats import format_of, image_suffix, is_lossy, is_volume_file, without_suffix
from medfedaug.data.splits import shuffled, split_patients
from medfedaug.data.volumes import VolumeFolder, is_black_and_white
from medfedaug.errors import DataError, first_line
from medfedaug.utils.files import parse_json, write_json
from medfedaug.utils.validation import first_of

if TYPE_CHECKING:
    from medfedaug.data.io.dicom_series import LeftOut

LISTING, _BEFORE = "dataset.json", "dataset.before.json"
_TRAINING = (("imagesTr", "labelsTr"), ("images", "labels"), ("images", "masks"), ("image", "label"))
_TEST = ("imagesTs", "labelsTs")
_CHANNEL = re.compile(r"(?P<name>.+)_(?P<channel>\d{4})")
_LABEL_ENDING = re.compile(r"(.+?)[-_.](mask|masks|seg|segmentation|label|labels|gt)", re.IGNORECASE)
_PART = re.compile(r"(.+)[-_][^-_]+")
_MOST_CLASSES = 200  # without names


@dataclass(frozen=True)
class Proposal:
    """A ``dataset.json`` that could be written.

    Args:
        layout: the folders in which images and label maps were found.
        notes: what a user should know: what is left out, or looks odd.
        replaces: whether there is a ``dataset.json`` of another kind.
    """

    site: VolumeFolder
    content: dict[str, Any]
    layout: str
    notes: tuple[str, ...]
    replaces: bool

    @property
    def folder(self) -> Path:
        """The site's folder."""
        return self.site.path

    @property
    def counts(self) -> dict[str, int]:
        """The number of cases of each split."""
        return {split: len(self.content[split]) for split in SPLITS}


def has_layout(folder: Path) -> bool:
    """Return whether a folder holds images and label maps in one of the layouts."""
    return _layout(folder) is not None


def propose(
    folder: str | Path,
    *,
    patient: str | None = None,
    labels: Sequence[str] | Mapping[int, str] = (),
    seed: int = 0,
    series: str | None = None,
    on_label: Callable[[int, int], None] | None = None,
) -> Proposal:
    """Find the cases of a folder, and split them by patient.

    Without test cases of its own, a site is split 60/20/20 (`medfedaug.data.splits.split_patients`); with
    them, a fifth of the other patients validates. All label maps are read, to know the classes.

    Args:
        folder: the site's folder.
        patient: a regular expression whose first group is the patient in the name of a case, such as
            ``"(.+)_"``; ``None``: every case is a patient's own.
        labels: names of the classes, background first, or by their value in the label maps; by default those
            of a ``dataset.json`` that is there, or ``class_1``, ... Two names fit any two values.
        seed: of the split.
        series: which DICOM series is the image, where a case has several
            (`medfedaug.data.io.dicom_series.select`).
        on_label: called with the number of label maps that were read, and of all.

    Raises:
        DataError: naming what cannot be used; nothing is written.
    """
    folder = Path(folder)
    found = _layout(folder)
    if not folder.is_dir() or found is None:
        some = ", ".join(f"{images} and {maps}" for images, maps in _TRAINING)
        raise DataError(
            "no such folder" if not folder.is_dir() else "holds no images beside label maps",
            path=folder,
            hint=f"Looked for are {some}; for anything else write {LISTING} as docs/data.md shows.",
        )
    name = folder.resolve().name
    there = _existing(folder)
    cases, notes, numbers = _pairs(folder, found, name, series)
    channels = [numbers[case.name] for case in cases]
    tested: list[Case] = []
    if found == _TRAINING[0] and all((folder / one).is_dir() for one in _TEST):
        tested, more, numbers = _pairs(folder, _TEST, name, series)
        notes += more
        channels += [numbers[case.name] for case in tested]
    _check_channels([*cases, *tested], channels, name)
    cases, tested = (_with_patients(listed, patient, name, folder) for listed in (cases, tested))
    if patient is None and (hint := _looks_grouped(cases)):
        notes.append(hint)
    classes = _classes([*cases, *tested], labels or _named(there) or (), name, on_label)
    if not labels:
        notes += _regions(there)
    ignored = [value for value, text in classes.items() if plain_name(text) == IGNORE]
    unknown = {value: classes.pop(value) for value in ignored[:1]}
    values = () if (*classes,) == (*range(len(classes)),) else (*classes,)
    if values:
        told = ", ".join(f"{value} is {text}" for value, text in classes.items())
        notes.append(f"values in the label maps: {told}")
    content: dict[str, Any] = {"labels": {str(value): text for value, text in classes.items()}}
    for value in unknown:
        content[IGNORE] = value
    notes += [f"voxels with the value {value} are unknown: neither learned nor scored" for value in unknown]
    named_channels = there.get("channel_names") or there.get("modality")
    if named_channels:
        content["channel_names"] = named_channels
    split = _split(name, cases, tested, seed)
    content |= {key: [_row(folder, case) for case in listed] for key, listed in split.items()}
    if not split["training"]:
        notes.append("fewer than three patients: an unseen site, which is tested only")
    named = tuple(str(text) for text in named_channels.values()) if named_channels else ()
    names = (*classes.values(),)
    site = VolumeFolder(
        name, folder, names, split, channel_names=named, label_values=values, ignore=next(iter(unknown), None)
    )
    site.check_splits()
    site.check_files()
    return Proposal(site, content, " and ".join(found), tuple(notes), bool(there))


def check_alike(proposals: Sequence[Proposal]) -> None:
    """Check that the sites of one federation have the same classes."""
    first, *others = proposals
    for other in others:
        try:
            check_classes(other.site, first.site.classes, f"site {first.site.name}")
        except DataError as error:
            problem = str(error).removesuffix(".")
            raise DataError(problem, hint="Give --labels for all sites at once.") from error


def write_proposal(proposal: Proposal, *, replace: bool = False) -> Path:
    """Write ``dataset.json``; with ``replace``, keep the one before as ``dataset.before.json``.

    Raises:
        DataError: when there is one already.
    """
    target, kept = proposal.folder / LISTING, proposal.folder / _BEFORE
    if target.exists():
        if not replace:
            raise DataError(
                "is there already", path=target, hint=f"--replace keeps it as {_BEFORE} and writes another."
            )
        if kept.exists():
            raise DataError("is there already", path=kept, hint="Move it away first.")
        target.rename(kept)
    write_json(target, proposal.content)
    return target


def _layout(folder: Path) -> tuple[str, str] | None:
    return next((pair for pair in _TRAINING if all((folder / one).is_dir() for one in pair)), None)


def _existing(folder: Path) -> dict[str, Any]:
    """A ``dataset.json`` that is there, nnU-Net's for instance; empty where there is none."""
    path = folder / LISTING
    if not path.exists():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"not readable as JSON ({first_line(error)})", path=path) from error
    return content if isinstance(content, dict) else {}


def _visible(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]


def _labels(folder: Path) -> list[tuple[str, Path]]:
    """The label maps of a folder, by their names: files of a known kind, and folders that hold one."""
    found = []
    for path in _visible(folder):
        if path.is_dir():
            inside = [file for file in path.rglob("*") if image_suffix(file.name)]
            found.append((path.name, inside[0] if len(inside) == 1 else path))
        elif image_suffix(path.name):
            found.append((without_suffix(path.name), path))
    return found


def _images(folder: Path, series: str | None, notes: list[str]) -> list[tuple[str, Path]]:
    """The images of a folder, by their names, with notes on all that is left out."""
    found = [
        (without_suffix(path.name), path)
        for path in _visible(folder)
        if path.is_file() and image_suffix(path.name)
    ]
    if series is None and all(path.is_file() and is_volume_file(path) for path in folder.iterdir()):
        return found
    from medfedaug.data.io.dicom_series import LeftOut, place_of_series, scan, select

    for below in (path for path in _visible(folder) if path.is_dir()):
        seen = scan(below, take=is_volume_file)
        chosen = select(seen.series, series)
        files = [file for file in seen.others if image_suffix(file.name)]
        places = [*files, *(place_of_series(one, seen.series) for one in chosen.chosen)]
        left_out = [*seen.left_out, *chosen.left_out, *chosen.unclear]
        if len(places) == 1 and places[0] is not None and not chosen.unclear:
            alone = len(seen.series) == 1 and places[0].is_dir()
            found.append((below.name, below if alone else places[0]))
        else:
            what = f"holds {len(places)} images" if places else "holds no image"
            left_out.append(LeftOut(below, f"{what}, one was expected"))
        notes += [_note(one, folder) for one in left_out]
    loose = scan(folder, skip=lambda below: "", take=is_volume_file)
    chosen = select(loose.series, series)
    for one in chosen.chosen:
        alone = len(one.files) == 1
        place = one.files[0]
        found.append((re.sub(r"\.(dcm|dicom|ima)$", "", place.name, flags=re.I) if alone else one.uid, place))
    notes += [_note(one, folder) for one in (*loose.left_out, *chosen.left_out, *chosen.unclear)]
    return found


def _note(left_out: LeftOut, folder: Path) -> str:
    path = left_out.path
    where = path.relative_to(folder.parent) if path.is_relative_to(folder.parent) else path
    return f"left out: {where}: {left_out.reason}"


def _pairs(
    folder: Path, layout: tuple[str, str], site: str, series: str | None
) -> tuple[list[Case], list[str], dict[str, tuple[str, ...]]]:
    """The cases that have both, notes on what has only one, and the numbers of the cases' channels."""
    notes: list[str] = []
    files, maps = _images(folder / layout[0], series, notes), _labels(folder / layout[1])
    whole = {name for stem, _ in maps for name in (stem, _without_ending(stem))}
    images: dict[str, dict[str, Path]] = defaultdict(dict)
    for stem, path in files:
        channel = _CHANNEL.fullmatch(stem)
        if channel is None or stem in whole:  # not a channel where the label map has the whole name
            _add(images[stem], "", path, site)
        else:
            _add(images[channel["name"]], channel["channel"], path, site)
    labels: dict[str, dict[str, Path]] = defaultdict(dict)
    for stem, path in maps:
        _add(labels[stem if stem in images else _without_ending(stem)], "", path, site)
    both = sorted(set(images) & set(labels))
    if not both:
        some = ", ".join(stem for stem, _ in (*files[:2], *maps[:2]))
        more = f" {notes[0][0].upper()}{notes[0][1:]}." if notes else ""
        raise DataError(
            f"no image of {layout[0]} has a label map of its name in {layout[1]}",
            site=site,
            path=folder,
            hint=(f"There are for instance {some}." if some else "") + more,
        )
    for what, alone in (("label map", set(images) - set(labels)), ("image", set(labels) - set(images))):
        if alone:
            notes.append(f"left out of {layout[0]}, without {what}: {len(alone)} ({first_of(sorted(alone))})")
    cases = []
    for name in both:
        first, *others = (path for _, path in sorted(images[name].items()))
        cases.append(Case(name, first, labels[name][""], others=tuple(others)))
    return cases, notes, {name: tuple(sorted(images[name])) for name in both}


def _without_ending(stem: str) -> str:
    ending = _LABEL_ENDING.fullmatch(stem)
    return ending[1] if ending else stem


def _add(found: dict[str, Path], channel: str, path: Path, site: str) -> None:
    """Take the only file for a channel of an image, or for all of it where the channel is empty."""
    other = found.get(channel) or found.get("")  # which comes before its channels
    if other is not None:
        raise DataError(
            f"is of the same case as {other.name}, and only one of them can be",
            site=site,
            path=path,
            hint="Move the other one away.",
        )
    found[channel] = path


def _check_channels(cases: Sequence[Case], channels: Sequence[tuple[str, ...]], site: str) -> None:
    """Check that the images have the same channels, by their numbers; one file is the channel 0."""
    found = [tuple(f"_{number or '0000'}" for number in numbers) for numbers in channels]
    usual, _ = Counter(found).most_common(1)[0]
    for case, own in zip(cases, found, strict=True):
        if own != usual:
            raise DataError(
                f"{case.name} has the channels {', '.join(own)}, others have {', '.join(usual)}",
                site=site,
                path=case.image,
            )


def _with_patients(cases: Sequence[Case], pattern: str | None, site: str, folder: Path) -> list[Case]:
    if pattern is None:
        return list(cases)
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise DataError(f"--patient {pattern!r} is no regular expression ({error})") from error
    found = []
    for case in cases:
        match = compiled.match(case.name)
        if match is None or not compiled.groups or not match[1]:
            raise DataError(
                f"--patient {pattern!r} finds no patient in the name {case.name!r}",
                site=site,
                path=folder,
                hint="The first group in brackets is the patient, as in '(.+)_'.",
            )
        found.append(replace(case, patient=match[1]))
    return found


def _looks_grouped(cases: Sequence[Case]) -> str:
    """A hint where names look as if several cases were of one patient."""
    starts = Counter(match[1] for case in cases if (match := _PART.fullmatch(case.name)))
    repeated = [start for start, number in starts.items() if number > 1]
    if len(starts) < 3 or len(repeated) * 2 < len(starts) or sum(starts.values()) < len(cases):
        return ""
    return (
        f"several names begin alike ({repeated[0]}, ...): if that is the patient, whose cases belong into "
        "one split, give --patient '(.+)[-_]'"
    )


def _classes(
    cases: Sequence[Case],
    given: Sequence[str] | Mapping[int, str],
    site: str,
    on_label: Callable[[int, int], None] | None,
) -> dict[int, str]:
    """The classes by their value in the label maps, named as given by value or in the order of the values."""
    holders: dict[float, Path] = {}
    drawn: set[float] = set()
    for number, case in enumerate(cases, start=1):
        path = Path(case.label)
        try:
            found = np.unique(np.asarray(format_of(path).read_label(path))).tolist()
        except Exception as error:  # whatever a reader raises
            raise DataError(
                f"cannot be read as a label map ({first_line(error)})", site=site, path=path
            ) from error
        drawn |= {0, 1} if is_black_and_white(path, found) else {*found}
        holders |= {value: holders.get(value, path) for value in found}
        if on_label is not None:
            on_label(number, len(cases))
    by_value = isinstance(given, Mapping) and {*holders} <= {*given}
    masks = drawn <= {0, 1} and len(given or UNNAMED) == 2 and not by_value
    values = sorted(drawn if masks else holders)
    known = dict(given) if isinstance(given, Mapping) else _inferred(values, given)
    unknown = [value for value in values if value not in known]
    if unknown:
        classes = ", ".join(f"{value} is {text}" for value, text in known.items()) or "not named"
        shown = first_of([f"{value:g}" for value in values], 6)
        holder = holders.get(unknown[0], Path(cases[0].label))
        lossy = "JPEG changes values: write label images as PNG." if is_lossy(holder) else ""
        raise DataError(
            f"has the value {unknown[0]:g}, and the classes are: {classes}",
            site=site,
            path=holder,
            hint=f"The label maps have the values {shown}. {lossy} Name the class of each with --labels "
            "0=background,VALUE=NAME,...",
        )
    names = {plain_name(text) for text in known.values()} - {""}
    if not 2 <= len(known) == len(names) or not all(0 <= value <= LARGEST_VALUE for value in known):
        raise DataError(
            f"has the classes {', '.join(f'{value} {text}' for value, text in known.items())}",
            site=site,
            hint=f"Two or more are needed, each with a name and a value from 0 to {LARGEST_VALUE}.",
        )
    return known


def _inferred(values: Sequence[float], names: Sequence[str]) -> dict[int, str]:
    """The classes of label maps by their value: two of any two values, else of 0, 1, 2, ..."""
    whole = [int(value) for value in values if 0 <= value <= LARGEST_VALUE and value == int(value)]
    number = max(2, *(value + 1 for value in whole)) if whole else 2
    pair = sorted({0, *whole}) if len(whole) == 1 else whole
    two = len(whole) == len(values) and len(pair) == len(names or UNNAMED) == 2
    # Values far apart are no indices: most of the classes would have no voxel.
    indices = number <= len(names) if names else number <= min(2 * len(values), _MOST_CLASSES)
    if two and not indices:
        return dict(zip(pair, names or ("background", "class_1"), strict=True))
    if names or not indices:
        return dict(enumerate(names))
    return {index: f"class_{index}" if index else "background" for index in range(number)}


def _named(content: Mapping[str, Any]) -> dict[int, str]:
    """The classes of a ``dataset.json`` by value: as in the decathlon, or values by name as in nnU-Net."""
    labels = content.get("labels")
    if not isinstance(labels, dict):
        return {}
    for pairs in (labels.items(), ((value, text) for text, value in labels.items())):
        try:
            return dict(sorted((int(value), str(text)) for value, text in pairs))
        except (TypeError, ValueError):  # the reverse, or nnU-Net's regions
            continue
    return {}


def _regions(content: Mapping[str, Any]) -> list[str]:
    """Notes on labels of nnU-Net that are regions of several labels."""
    labels = content.get("labels")
    pairs = labels.items() if isinstance(labels, dict) else ()
    regions = ", ".join(str(text) for text, values in pairs if isinstance(values, list))
    note = f"regions of several labels ({regions}) are not made: every label is a class of its own, "
    return [f"{note}to be named with --labels background,..."] if regions else []


def _split(
    name: str, cases: Sequence[Case], tested: Sequence[Case], seed: int
) -> dict[str, tuple[Case, ...]]:
    if not tested:
        return {key: tuple(part) for key, part in split_patients(name, cases, seed).items()}
    patients = by_patient(cases)
    drawn = shuffled(patients, "split", name, "patients", seed)
    held = max(1, round(0.2 * len(patients)))
    parts = [tuple(case for own in some for case in own) for some in (drawn[held:], drawn[:held])]
    return dict(zip(SPLITS, (*parts, tuple(tested)), strict=True))


def _row(folder: Path, case: Case) -> dict[str, Any]:
    files = [file.relative_to(folder).as_posix() for file in case.files]
    row: dict[str, Any] = {"image": files if len(files) > 1 else files[0]}
    row["label"] = Path(case.label).relative_to(folder).as_posix()
    return {**row, "patient": case.patient} if case.patient else row
