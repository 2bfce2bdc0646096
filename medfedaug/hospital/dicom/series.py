"""Find DICOM series in folders, choose among them, and open them.

`scan` walks a folder of any depth and reads the header of every file once, under any name. It groups files
into volumes: the slices of a series with one orientation, and one echo, phase or b-value. Each
`medfedaug.hospital.dicom.volumes.DicomSeries` knows its geometry, or the reason why it cannot be read.
`select` chooses among them, and gives the reason for each series that it leaves out.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medfedaug.data.io.base import LeftOut, Scan, Selection, walk
from medfedaug.errors import ReaderError, config_errors
from medfedaug.hospital.dicom.checks import require
from medfedaug.hospital.dicom.headers import DicomInstance, is_dicom_file, one_line, read_instance
from medfedaug.hospital.dicom.pixels import read_slices
from medfedaug.hospital.dicom.volumes import DicomSeries, volumes_of
from medfedaug.utils.printable import counted
from medfedaug.utils.validation import first_of

if TYPE_CHECKING:
    import SimpleITK as sitk

_REASONS = 3  # in a message


def scan(
    root: Path,
    *,
    skip: Callable[[Path], str | None] = lambda folder: None,
    take: Callable[[Path], bool] = lambda file: False,
) -> Scan[DicomSeries]:
    """Look at all files in a folder and below it; see `medfedaug.data.io.base.SeriesFormat.scan`."""
    instances: list[DicomInstance] = []
    others: list[Path] = []
    left_out: list[LeftOut] = []
    no_images: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for folder, files in walk(root, skip, left_out):
        for file in files:
            if take(file):
                others.append(file)
                continue
            try:
                instance = read_instance(file)
            except ReaderError as error:
                no_images[folder, str(error)].append(file)
                continue
            if instance.no_image:
                no_images[folder, instance.no_image].append(file)
            else:
                instances.append(instance)
    for (folder, reason), files in no_images.items():
        names = first_of([one_line(file.name) for file in files])
        left_out.append(LeftOut(folder, f"{counted(len(files), 'file')}: {reason} ({names})"))
    return Scan(tuple(_volumes(instances)), tuple(others), tuple(left_out))


def _volumes(instances: Sequence[DicomInstance]) -> list[DicomSeries]:
    by_series: dict[tuple[str, str], dict[Path, list[DicomInstance]]] = defaultdict(lambda: defaultdict(list))
    for instance in instances:
        by_series[instance.study, instance.series][instance.path.parent].append(instance)
    volumes: list[DicomSeries] = []
    for folders in by_series.values():
        volumes += _volumes_of_series(folders)
    return sorted(volumes, key=lambda series: (series.folders[0], series.first.number.zfill(6), series.uid))


def _volumes_of_series(folders: dict[Path, list[DicomInstance]]) -> list[DicomSeries]:
    """Return the volumes of each folder, or fewer sound ones whose slices are spread over the folders."""
    by_folder = [volume for instances in folders.values() for volume in volumes_of(instances)]
    instances = [instance for instances in folders.values() for instance in instances]
    slices = [piece for instance in instances for piece in instance.slices]
    repeated = len({piece.instance for piece in slices}) < len(instances)
    if len(folders) < 2 or repeated or any(piece.position is None for piece in slices):
        return by_folder
    volumes = volumes_of(instances)
    sound = not any(volume.problem for volume in volumes)
    return volumes if sound and len(volumes) < len(by_folder) else by_folder


def compile_series(pattern: str | None, option: str = "--series") -> re.Pattern[str] | None:
    """Compile a user's regular expression, which ignores case."""
    if pattern is None:
        return None
    with config_errors(f"{option} {pattern!r} is not a regular expression", re.error):
        return re.compile(pattern, re.IGNORECASE)


def select(series: Sequence[DicomSeries], pattern: str | None = None) -> Selection[DicomSeries]:
    """Choose one series of each study in each folder.

    Among several series of one study in one folder, this is the one that ``pattern`` names (a
    SeriesInstanceUID, or a regular expression in `DicomSeries.searched`), or the only usual volume: no
    localiser, no secondary capture, no single slice beside a volume.
    """
    expression = compile_series(pattern)
    groups: dict[tuple[tuple[Path, ...], str], list[DicomSeries]] = defaultdict(list)
    for one in series:
        groups[one.folders, one.first.study].append(one)
    selection = Selection[DicomSeries]()
    for group in groups.values():
        if expression is None:
            doubts, name = _doubts(group), ""
        else:
            exact = [one for one in group if one.uid == pattern]
            matches = exact or [one for one in group if expression.search(one.searched)]
            doubts = ["" if one in matches else "not what --series names" for one in group]
            name = " of the name that --series gives"
        candidates = []
        for one, doubt in zip(group, doubts, strict=True):
            if doubt:
                selection.left_out.append(LeftOut(one.folders[0], f"{one.text}: {doubt}"))
            else:
                candidates.append(one)
        if len(candidates) > 1:
            reason = f"{_several(candidates, name)}; choose one with --series REGEX or UID"
            selection.unclear.append(LeftOut(group[0].folders[0], reason))
        else:
            selection.chosen += candidates
    return selection


def _doubts(group: Sequence[DicomSeries]) -> list[str]:
    """Return the reason why each series is not a usual volume; empty for a usual one."""
    volume = any(len(one.slices) > 1 and not one.doubt for one in group)
    doubts = [
        one.doubt or ("a single slice beside a volume" if volume and len(one.slices) == 1 else "")
        for one in group
    ]
    return [f"{doubt}; --series takes it" if doubt else "" for doubt in doubts]


def _several(series: Sequence[DicomSeries], name: str = "") -> str:
    uids = {one.uid for one in series}
    kind = f"{len(uids)} DICOM series" if len(uids) > 1 else f"{len(series)} volumes of one DICOM series"
    return f"holds {kind}{name}, expected one: {'; '.join(one.text for one in series)}"


def open_series(path: Path) -> DicomSeries:
    """Return the only volume in a folder of any depth, or the volume of a file and the files beside it."""
    if path.is_dir():
        content = scan(path)
        series = content.series
        reasons = "; ".join(reason for _, reason in content.left_out[:_REASONS])
        require(series, "holds no DICOM series, expected one" + (f": {reasons}" if reasons else ""))
    else:
        series = _volumes_with(path)
    if len(series) > 1:
        raise ReaderError(
            f"{_several(series)}; give a file of the intended series instead of the folder"
            if path.is_dir()
            else f"{_several(series)}; export them into files of their own"
        )
    require(not series[0].problem, series[0].problem)
    return series[0]


def _volumes_with(path: Path) -> tuple[DicomSeries, ...]:
    first = read_instance(path)
    require(not first.no_image, f"no image: {first.no_image}")
    instances = []
    for file in sorted(path.parent.iterdir()):
        if is_dicom_file(file) and not file.name.startswith("."):
            with suppress(ReaderError):
                instance = read_instance(file)
                if instance.slices and (instance.study, instance.series) == (first.study, first.series):
                    instances.append(instance)
    if path not in {instance.path for instance in instances}:
        instances.append(first)
    return tuple(volume for volume in volumes_of(instances) if path in volume.files)


def place_of_series(series: DicomSeries, others: Sequence[DicomSeries]) -> Path | None:
    """Return the path by which `open_series` opens one series of a scan; ``None`` where there is none."""
    folder = Path(os.path.commonpath(series.folders))
    inside = [one for one in others if any(path.is_relative_to(folder) for path in one.folders)]
    if len(inside) == 1:
        return folder
    return series.files[0] if len(series.folders) == 1 else None


def files_of_series(path: Path) -> list[Path]:
    """Return the files of the volume that `open_series` opens, sorted.

    A folder without exactly one whole volume has all its files, and another file itself alone.
    """
    if not path.is_dir() and not is_dicom_file(path):
        return [path]
    with suppress(ReaderError, OSError):
        return sorted(open_series(path).files)
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def load_series(series: DicomSeries) -> sitk.Image:
    """Load the voxels of a series on its grid, float32 in the units of its modality."""
    import SimpleITK as sitk

    image = sitk.GetImageFromArray(read_slices(series.slices), isVector=series.channels > 1)
    affine = series.affine
    # Without a geometry in the files, indices count as millimetres.
    lps = np.diag([-1.0, -1, 1, 1]) @ affine if affine is not None else np.eye(4)
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    return image
