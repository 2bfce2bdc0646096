"""DICOM series as archives write them: found in folders, chosen, opened, and named where they are left out.

`scan` walks a folder of any depth and opens every file once, whatever its name, without its voxels. It groups
the files into volumes: the slices of a series that have one orientation, and one echo, phase or b-value. Each
`medfedaug.data.io.dicom_volumes.DicomSeries` knows its geometry, and why it cannot be read where it cannot.
`select` chooses among them, and says of the others why not.
"""

from __future__ import annotations

import filecmp
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pydicom

from medfedaug.data.io.dicom_headers import (
    DicomInstance,
    is_dicom_file,
    one_line,
    read_instance,
    reason_of,
    values_of,
)
from medfedaug.data.io.dicom_pixels import read_slices
from medfedaug.data.io.dicom_volumes import DicomSeries, volumes_of
from medfedaug.errors import ConfigError, ReaderError
from medfedaug.utils.printable import counted
from medfedaug.utils.validation import first_of

if TYPE_CHECKING:
    import SimpleITK as sitk

_SHOWN = 3


class LeftOut(NamedTuple):
    """Files that are no case of anything, and the reason, in words without a full stop."""

    path: Path
    reason: str


@dataclass(frozen=True)
class DicomScan:
    """Content of a folder: volumes by folder and identity, files of other formats, and the rest."""

    series: tuple[DicomSeries, ...]
    others: tuple[Path, ...]
    left_out: tuple[LeftOut, ...]


@dataclass
class Selection:
    """Series of a scan that are cases.

    Args:
        unclear: folders or files of which several series could be meant, with the reason.
    """

    chosen: list[DicomSeries] = field(default_factory=list)
    unclear: list[LeftOut] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def scan(
    root: Path,
    *,
    skip: Callable[[Path], str | None] = lambda folder: None,
    take: Callable[[Path], bool] = lambda file: False,
) -> DicomScan:
    """Look at all files in a folder and below it.

    Args:
        root: the folder. Links are followed, and no folder is walked twice.
        skip: says of a folder why it is left out; ``""`` leaves it out without a word, ``None`` takes it.
        take: says of a file that it is an image of another format by its name, and not to be opened.
    """
    instances: list[DicomInstance] = []
    others: list[Path] = []
    left_out: list[LeftOut] = []
    no_images: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for folder, files in _walk(root, skip, left_out, set()):
        for file in files:
            if take(file):
                others.append(file)
                continue
            try:
                found = read_instance(file)
            except ReaderError as error:
                no_images[folder, str(error)].append(file)
                continue
            if found.no_image:
                no_images[folder, found.no_image].append(file)
                left_out += _not_there(found)
            else:
                instances.append(found)
    for (folder, reason), files in no_images.items():
        some = first_of([one_line(file.name) for file in files])
        left_out.append(LeftOut(folder, f"{counted(len(files), 'file')}: {reason} ({some})"))
    series = _gathered(instances, left_out)
    return DicomScan(tuple(series), tuple(others), tuple(left_out))


def _walk(
    folder: Path, skip: Callable[[Path], str | None], left_out: list[LeftOut], seen: set[tuple[int, int]]
) -> Iterator[tuple[Path, list[Path]]]:
    try:
        status = folder.stat()
        inside = sorted(folder.iterdir())
    except OSError as error:
        left_out.append(LeftOut(folder, f"cannot be opened ({reason_of(error)})"))
        return
    if (status.st_dev, status.st_ino) in seen:
        left_out.append(LeftOut(folder, "a link to a folder that is looked at already"))
        return
    seen.add((status.st_dev, status.st_ino))
    visible = [path for path in inside if not path.name.startswith(".")]
    folders = [path for path in visible if path.is_dir()]
    yield folder, [path for path in visible if path not in {*folders}]
    for below in folders:
        reason = skip(below)
        if reason is None:
            yield from _walk(below, skip, left_out, seen)
        elif reason:
            left_out.append(LeftOut(below, reason))


def _not_there(index: DicomInstance) -> list[LeftOut]:
    """Return the files that a DICOMDIR lists and the folder lacks."""
    if index.no_image != "DICOMDIR":
        return []
    records = values_of(pydicom.dcmread(index.path, force=True).get("DirectoryRecordSequence"))
    listed = [values_of(record.get("ReferencedFileID")) for record in records]
    missing = [
        str(Path(*parts)) for parts in listed if parts and not _inside(index.path.parent, parts).exists()
    ]
    if not missing:
        return []
    some = first_of([*map(one_line, missing)])
    return [LeftOut(index.path, f"lists {counted(len(missing), 'file')} that are not there ({some})")]


def _inside(folder: Path, parts: Sequence[str]) -> Path:
    for part in parts:  # a CD's names are in capitals, and its copies often in small letters
        folder = folder / part if (folder / part).exists() else folder / str(part).lower()
    return folder


def _gathered(instances: Sequence[DicomInstance], left_out: list[LeftOut]) -> list[DicomSeries]:
    """Volumes of all files: a series is what lies in one folder, or is spread over several."""
    by_series: dict[tuple[str, str], dict[Path, list[DicomInstance]]] = defaultdict(lambda: defaultdict(list))
    for instance in instances:
        by_series[instance.study, instance.series][instance.path.parent].append(instance)
    found: list[DicomSeries] = []
    for folders in by_series.values():
        if len(folders) > 1:
            folders = _without_copies(folders, left_out)
        together = _spread(folders)
        for group in [together] if together else folders.values():
            found += volumes_of(group)
    return sorted(found, key=lambda series: (series.folders[0], series.first.number.zfill(6), series.uid))


def _without_copies(
    folders: dict[Path, list[DicomInstance]], left_out: list[LeftOut]
) -> dict[Path, list[DicomInstance]]:
    kept: dict[Path, list[DicomInstance]] = {}
    for folder, instances in folders.items():
        other = next((path for path, found in kept.items() if _copies(instances, found)), None)
        if other is None:
            kept[folder] = instances
        else:
            left_out.append(LeftOut(folder, f"a copy of the series in {other}"))
    return kept


def _copies(some: Sequence[DicomInstance], others: Sequence[DicomInstance]) -> bool:
    """True where files are the same objects; one is compared, since an identity may be given twice."""
    mine, theirs = (
        {piece.instance: found.path for found in group for piece in found.slices[:1]}
        for group in (some, others)
    )
    if mine.keys() != theirs.keys() or len(mine) < len(some):
        return False
    middle = sorted(mine)[len(mine) // 2]
    return filecmp.cmp(mine[middle], theirs[middle], shallow=False)


def _spread(folders: dict[Path, list[DicomInstance]]) -> list[DicomInstance] | None:
    """Return all files of a series that is spread over folders; ``None`` where each folder has its own."""
    if len(folders) < 2:
        return None
    together = [instance for instances in folders.values() for instance in instances]
    slices = [piece for instance in together for piece in instance.slices]
    names = {piece.instance for piece in slices}
    if len(names) < len(together) or any(piece.position is None for piece in slices):
        return None
    volumes = volumes_of(together)
    apart = [volume for instances in folders.values() for volume in volumes_of(instances)]
    whole = not any(volume.problem for volume in volumes)
    return together if whole and len(volumes) < len(apart) else None


def compile_series(pattern: str | None, option: str = "--series") -> re.Pattern[str] | None:
    """A regular expression of a user, which does not mind capitals."""
    if pattern is None:
        return None
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"{option} {pattern!r} is no regular expression ({error})") from error


def select(series: Sequence[DicomSeries], pattern: str | None = None) -> Selection:
    """Choose one series of each study in each folder.

    Series in folders of their own are each a case. Of several in one folder that are of one study, one is
    taken: the one that ``pattern`` names, or the only one that is a usual volume, beside localisers,
    secondary captures and single slices.

    Args:
        series: of `scan`.
        pattern: the identity of a series, or a regular expression that is searched for, without minding
            capitals, in `DicomSeries.searched`.
    """
    wanted = compile_series(pattern)
    groups: dict[tuple[tuple[Path, ...], str], list[DicomSeries]] = defaultdict(list)
    for one in series:
        groups[one.folders, one.first.study].append(one)
    found = Selection()
    for group in groups.values():
        if wanted is None:
            _usual(group, found)
            continue
        exact = [one for one in group if one.uid == pattern]
        meant = exact or [one for one in group if wanted.search(one.searched)]
        found.left_out += [
            LeftOut(one.folders[0], f"{one.text}: not what --series names")
            for one in group
            if one not in meant
        ]
        if len(meant) > 1:
            found.unclear.append(_unclear(meant, " of the name that --series gives"))
        found.chosen += meant if len(meant) == 1 else []
    return found


def _usual(group: Sequence[DicomSeries], found: Selection) -> None:
    deep = any(len(one.slices) > 1 and not one.doubt for one in group)
    doubts = [
        one.doubt or ("a single slice beside a volume" if deep and len(one.slices) == 1 else "")
        for one in group
    ]
    meant = [one for one, doubt in zip(group, doubts, strict=True) if not doubt]
    found.left_out += [
        LeftOut(one.folders[0], f"{one.text}: {doubt}; --series takes it")
        for one, doubt in zip(group, doubts, strict=True)
        if doubt
    ]
    if len(meant) == 1:
        found.chosen += meant
    elif meant:
        found.unclear.append(_unclear(meant))


def _unclear(series: Sequence[DicomSeries], which: str = "") -> LeftOut:
    return LeftOut(series[0].folders[0], f"{_several(series, which)}; choose one with --series REGEX or UID")


def _several(series: Sequence[DicomSeries], which: str = "") -> str:
    """Describe the contents of a folder that is not one volume."""
    names = {one.uid for one in series}
    if len(names) > 1:
        what = f"holds {len(names)} DICOM series{which}, one was expected"
    else:
        what = f"holds {len(series)} volumes of one DICOM series{which}, one was expected"
    return f"{what}: {'; '.join(one.text for one in series)}"


def open_series(path: Path) -> DicomSeries:
    """The one volume in a folder of any depth; or the one that a file is of, with the files beside it.

    Raises:
        ReaderError: where there is none, where it cannot be read, and where there are several, with what
            there is.
    """
    if path.is_dir():
        found = scan(path)
        series = found.series
        if not series:
            reasons = "; ".join(reason for _, reason in found.left_out[:_SHOWN])
            raise ReaderError("holds no DICOM series, one was expected" + (f": {reasons}" if reasons else ""))
    else:
        series = tuple(_beside(path))
    if len(series) > 1:
        raise ReaderError(
            f"{_several(series)}; give a file of the one that is meant in place of the folder"
            if path.is_dir()
            else f"{_several(series)}; export them into files of their own"
        )
    if series[0].problem:
        raise ReaderError(series[0].problem)
    return series[0]


def _beside(path: Path) -> list[DicomSeries]:
    """The volumes that a file has slices of."""
    own = read_instance(path)
    if own.no_image:
        raise ReaderError(f"no image: {own.no_image}")
    instances = []
    for file in sorted(path.parent.iterdir()):
        if is_dicom_file(file) and not file.name.startswith("."):
            try:
                found = read_instance(file)
            except ReaderError:
                continue
            if found.slices and (found.study, found.series) == (own.study, own.series):
                instances.append(found)
    if path not in {instance.path for instance in instances}:
        instances.append(own)
    return [one for one in volumes_of(instances) if path in one.files]


def place_of_series(series: DicomSeries, others: Sequence[DicomSeries]) -> Path | None:
    """The path by which `open_series` finds a series among others of its scan; ``None`` where none does."""
    folder = Path(os.path.commonpath(series.folders))
    beside = [one for one in others if any(path.is_relative_to(folder) for path in one.folders)]
    if len(beside) == 1:
        return folder
    return series.files[0] if len(series.folders) == 1 else None


def files_of_series(path: Path) -> list[Path]:
    """The files of the volume in a folder, or of the one that a file is of, sorted.

    Of a folder without one whole volume all files, and of another file itself alone.
    """
    if not path.is_dir() and not is_dicom_file(path):
        return [path]
    try:
        return sorted(open_series(path).files)
    except (ReaderError, OSError):
        return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def voxels_of_series(series: DicomSeries) -> np.ndarray:
    """The voxels of a series, (X, Y, Z) or (X, Y, Z, C), float32 in the units of its modality."""
    return read_slices(series.slices).swapaxes(0, 2)


def load_series(series: DicomSeries) -> sitk.Image:
    """The voxels of a series on its own grid; else as `voxels_of_series`."""
    import SimpleITK as sitk

    image = sitk.GetImageFromArray(read_slices(series.slices), isVector=series.channels > 1)
    affine = series.affine
    # Where the files do not say, indices count as millimetres.
    lps = np.diag([-1.0, -1, 1, 1]) @ affine if affine is not None else np.eye(4)
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    return image
