"""Find images and label maps in common layouts of folders, and propose a ``dataset.json``.

The layouts are ``imagesTr`` and ``labelsTr`` of nnU-Net and the decathlon (with ``imagesTs`` and
``labelsTs`` where test cases have label maps), and ``images`` beside ``labels`` or ``masks``. An image is a
file, a folder with one file or one DICOM series, or nnU-Net's one file per channel: ``NAME_0000``, ... This
module needs no PyTorch, and a folder without DICOM needs no pydicom.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from medfedaug.data.base import SPLITS, Case, by_patient, plain_name, reading, shuffled, split_patients
from medfedaug.data.dataset_json import IGNORE, LARGEST_VALUE, LAYOUTS, UNNAMED, find_layout, unseen_note
from medfedaug.data.io.formats import format_of, image_suffix, is_lossy, without_suffix
from medfedaug.data.volumes import VolumeFolder, is_black_and_white
from medfedaug.errors import DataError, data_errors
from medfedaug.utils.files import parse_json, write_json
from medfedaug.utils.validation import first_of

LISTING, _BEFORE = "dataset.json", "dataset.before.json"
_TEST = ("imagesTs", "labelsTs")
_CHANNEL = re.compile(r"(?P<name>.+)_(?P<channel>\d{4})")
_LABEL_ENDING = re.compile(r"(.+?)[-_.](mask|masks|seg|segmentation|label|labels|gt)", re.IGNORECASE)
_PART = re.compile(r"(.+)[-_][^-_]+")
_MOST_CLASSES = 200  # without names


@dataclass(frozen=True)
class Proposal:
    """Content for a ``dataset.json``."""

    site: VolumeFolder
    content: dict[str, Any]
    layout: str  # names of the folders of images and label maps
    notes: tuple[str, ...]  # files that are left out, and odd findings

    @property
    def counts(self) -> dict[str, int]:
        """The number of cases of each split."""
        return {split: len(self.content[split]) for split in SPLITS}


def propose(
    folder: str | Path,
    *,
    patient: str | None = None,
    labels: Sequence[str] | Mapping[int, str] = (),
    seed: int = 0,
) -> Proposal:
    """Find the cases of a folder, and split them by patient.

    A site without a test folder is split 60/20/20 (`medfedaug.data.base.split_patients`); with one, a fifth
    of the other patients validates. The classes follow from all label maps.

    Args:
        patient: a regular expression whose first group is the patient in the name of a case, such as
            ``"(.+)_"``; ``None``: every case stands for a patient.
        labels: names of the classes, background first, or by their value in the label maps; by default those
            of an existing ``dataset.json``, or ``class_1``, ... Two names fit any two values.
    """
    folder = Path(folder)
    layout = find_layout(folder)
    if layout is None:
        problem = "holds no images beside label maps" if folder.is_dir() else "no such folder"
        pairs = ", ".join(f"{images} and {maps}" for images, maps in LAYOUTS)
        hint = f"Looked for are {pairs}; for anything else write {LISTING} as docs/howto/data.md shows."
        raise DataError(problem, path=folder, hint=hint)
    name = folder.resolve().name
    existing = _existing(folder)
    notes: list[str] = []
    channels = _pairs(folder, layout, name, notes)
    test_channels: dict[Case, tuple[str, ...]] = {}
    if layout == LAYOUTS[0] and all((folder / part).is_dir() for part in _TEST):
        test_channels = _pairs(folder, _TEST, name, notes)
    _check_channels({**channels, **test_channels}, name)
    cases, tested = (_with_patients(listed, patient, name, folder) for listed in (channels, test_channels))
    if patient is None and (hint := _looks_grouped(cases)):
        notes.append(hint)
    classes = _classes([*cases, *tested], labels or _named(existing) or (), name, notes)
    ignore = next((value for value, text in classes.items() if plain_name(text) == IGNORE), None)
    if ignore is not None:
        del classes[ignore]
    values = () if (*classes,) == (*range(len(classes)),) else (*classes,)
    if values:
        notes.append(f"values in the label maps: {_text(classes)}")
    content: dict[str, Any] = {"labels": {str(value): text for value, text in classes.items()}}
    if ignore is not None:
        content[IGNORE] = ignore
        notes.append(f"voxels with the value {ignore} are unknown: neither learned nor scored")
    listed_channels = existing.get("channel_names") or existing.get("modality")
    listed_channels = listed_channels if isinstance(listed_channels, dict) else {}
    if listed_channels:
        content["channel_names"] = listed_channels
    split = _split(name, cases, tested, seed)
    content |= {key: [_row(folder, case) for case in listed] for key, listed in split.items()}
    if not split["training"]:
        notes.append("fewer than three patients: an unseen site, which is tested only")
    names, channel_names = tuple(classes.values()), tuple(map(str, listed_channels.values()))
    site = VolumeFolder(
        name, folder, names, split, channel_names=channel_names, label_values=values, ignore=ignore
    )
    site.check_splits()
    return Proposal(site, content, " and ".join(layout), tuple(notes))


def write_proposal(proposal: Proposal) -> Path:
    """Write ``dataset.json``, and keep an existing one as ``dataset.before.json``, which must not exist."""
    target, kept = proposal.site.path / LISTING, proposal.site.path / _BEFORE
    if target.exists():
        if kept.exists():
            raise DataError("exists already", path=kept, hint="Move it away first.")
        target.rename(kept)
    write_json(target, proposal.content)
    return target


def _existing(folder: Path) -> dict[str, Any]:
    """Read an existing ``dataset.json``, such as nnU-Net's; empty without one."""
    path = folder / LISTING
    if not path.exists():
        return {}
    with data_errors("not readable as JSON", OSError, ValueError, path=path):
        content = parse_json(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _entries(folder: Path) -> list[tuple[str, Path]]:
    """List the images or label maps of a folder with their names: files, and folders that hold one."""
    entries = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            inside = [file for file in path.rglob("*") if image_suffix(file.name)]
            entries.append((path.name, inside[0] if len(inside) == 1 else path))
        elif image_suffix(path.name):
            entries.append((without_suffix(path.name), path))
    return entries


def _pairs(folder: Path, layout: tuple[str, str], site: str, notes: list[str]) -> dict[Case, tuple[str, ...]]:
    """Return the cases with image and label map, and the channels of each; append notes on the others."""
    files, maps = _entries(folder / layout[0]), _entries(folder / layout[1])
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
        examples = ", ".join(stem for stem, _ in (*files[:2], *maps[:2]))
        hint = f"There are for instance {examples}." if examples else ""
        problem = f"no image of {layout[0]} has a label map of its name in {layout[1]}"
        raise DataError(problem, site=site, path=folder, hint=hint)
    for missing, names in (("label map", set(images) - set(labels)), ("image", set(labels) - set(images))):
        if names:
            text = f"{len(names)} ({first_of(sorted(names))})"
            notes.append(f"left out of {layout[0]}, without {missing}: {text}")
    cases = {}
    for name in both:
        channels, (first, *others) = zip(*sorted(images[name].items()), strict=True)
        case = Case(name, first, labels[name][""], others=tuple(others))
        cases[case] = tuple(f"_{channel or '0000'}" for channel in channels)
    return cases


def _without_ending(stem: str) -> str:
    ending = _LABEL_ENDING.fullmatch(stem)
    return ending[1] if ending else stem


def _add(files: dict[str, Path], channel: str, path: Path, site: str) -> None:
    """Add the only file of a channel, or of all channels where the channel is empty."""
    other = files.get(channel) or files.get("")  # which comes before its channels
    if other is not None:
        problem = f"is of the same case as {other.name}, and only one of them can be"
        raise DataError(problem, site=site, path=path, hint="Move the other one away.")
    files[channel] = path


def _check_channels(channels: Mapping[Case, tuple[str, ...]], site: str) -> None:
    usual, _ = Counter(channels.values()).most_common(1)[0]
    for case, names in channels.items():
        if names != usual:
            problem = f"{case.name} has the channels {', '.join(names)}, others have {', '.join(usual)}"
            raise DataError(problem, site=site, path=case.image)


def _with_patients(cases: Iterable[Case], pattern: str | None, site: str, folder: Path) -> list[Case]:
    if pattern is None:
        return list(cases)
    named = []
    for case in cases:
        try:
            named.append(replace(case, patient=re.match(pattern, case.name)[1]))  # type: ignore[index]
        except (re.error, TypeError, IndexError) as error:
            problem = f"--patient {pattern!r} finds no patient in the name {case.name!r}"
            hint = "The first group in brackets is the patient, as in '(.+)_'."
            raise DataError(problem, site=site, path=folder, hint=hint) from error
    return named


def _looks_grouped(cases: Sequence[Case]) -> str:
    """Return a hint where several cases of a patient are likely by their names; otherwise empty."""
    starts = Counter(match[1] for case in cases if (match := _PART.fullmatch(case.name)))
    repeated = [start for start, number in starts.items() if number > 1]
    if len(starts) < 3 or len(repeated) * 2 < len(starts) or sum(starts.values()) < len(cases):
        return ""
    return (
        f"several names begin alike ({repeated[0]}, ...): if that is the patient, whose cases belong into "
        "one split, give --patient '(.+)[-_]'"
    )


def _classes(
    cases: Sequence[Case], names: Sequence[str] | Mapping[int, str], site: str, notes: list[str]
) -> dict[int, str]:
    """Return the classes by value, with names by value or in the order of values; note those without one."""
    holders: dict[float, Path] = {}
    drawn: set[float] = set()
    empty: list[str] = []
    for case in cases:
        path = Path(case.label)
        with reading(site, path):
            content = np.unique(np.asarray(format_of(path).read_label(path))).tolist()
        drawn |= {0, 1} if is_black_and_white(path, content) else {*content}
        holders |= {value: holders.get(value, path) for value in content}
        if len(content) == 1:
            empty.append(path.name)
    if empty:
        notes.append(f"empty or full, of one value everywhere: label maps {first_of(empty, 6)}")
    by_value = isinstance(names, Mapping) and {*holders} <= {*names}
    masks = drawn <= {0, 1} and len(names or UNNAMED) == 2 and not by_value
    values = sorted(drawn if masks else holders)
    classes = dict(names) if isinstance(names, Mapping) else _inferred(values, names)
    unknown = [value for value in values if value not in classes]
    if unknown:
        holder = holders.get(unknown[0], Path(cases[0].label))
        hint = f"The label maps have the values {first_of([f'{value:g}' for value in values], 6)}. "
        hint += "JPEG changes values: write label images as PNG. " if is_lossy(holder) else ""
        hint += "Name the class of each with --labels 0=background,VALUE=NAME,..."
        named = f"the classes are {_text(classes)}" if classes else "no class is named"
        problem = f"has the value {unknown[0]:g}, and {named}"
        raise DataError(problem, site=site, path=holder, hint=hint)
    plain = {plain_name(text) for text in classes.values()} - {""}
    if not 2 <= len(classes) == len(plain) or not all(0 <= value <= LARGEST_VALUE for value in classes):
        problem = f"has the classes {', '.join(f'{value} {text}' for value, text in classes.items())}"
        hint = f"Two or more are needed, each with a name and a value from 0 to {LARGEST_VALUE}."
        raise DataError(problem, site=site, hint=hint)
    absent = [text for value, text in classes.items() if value not in (min(classes), *values)]
    if unseen := [text for text in absent if plain_name(text) != IGNORE]:
        notes.append(unseen_note(unseen))
    return classes


def _text(classes: Mapping[int, str]) -> str:
    return ", ".join(f"{value} is {text}" for value, text in classes.items())


def _inferred(values: Sequence[float], names: Sequence[str]) -> dict[int, str]:
    """Return classes by value: two for any two values, otherwise for 0, 1, 2, ..."""
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
    """Return the classes of a ``dataset.json`` by value, from the decathlon's or nnU-Net's mapping."""
    labels = content.get("labels")
    if not isinstance(labels, dict):
        return {}
    for pairs in (labels.items(), ((value, text) for text, value in labels.items())):
        with suppress(TypeError, ValueError):  # the reverse, or nnU-Net's regions
            return dict(sorted((int(value), str(text)) for value, text in pairs))
    return {}


def _split(
    name: str, cases: Sequence[Case], tested: Sequence[Case], seed: int
) -> dict[str, tuple[Case, ...]]:
    if not tested:
        return {key: tuple(part) for key, part in split_patients(name, cases, seed).items()}
    patients = by_patient(cases)
    drawn = shuffled(patients, "split", name, "patients", seed)
    held = max(1, round(0.2 * len(patients)))
    parts = [tuple(chain.from_iterable(part)) for part in (drawn[held:], drawn[:held])]
    return dict(zip(SPLITS, (*parts, tuple(tested)), strict=True))


def _row(folder: Path, case: Case) -> dict[str, Any]:
    files = [file.relative_to(folder).as_posix() for file in case.files]
    row: dict[str, Any] = {"image": files if len(files) > 1 else files[0]}
    row["label"] = Path(case.label).relative_to(folder).as_posix()
    return {**row, "patient": case.patient} if case.patient else row
