"""Open the volumes of fetched series, bring them to one grid, and write them as NIfTI."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import nibabel
import numpy as np
import SimpleITK as sitk

from medfedaug.data.io.base import pack_nifti
from medfedaug.errors import ReaderError, translated
from medfedaug.hospital.dicom.checks import require
from medfedaug.hospital.dicom.series import compile_series, load_series, scan, select
from medfedaug.hospital.dicom.volumes import DicomSeries
from medfedaug.utils.files import private_folder, write_atomic
from medfedaug.utils.validation import first_of

_SAME_PLACE = 1e-3  # of a voxel


_PARTS = ("b-value", "echo", "echo time", "inversion time", "phase", "trigger time", "frame at")
_PLANES = ("axial", "coronal", "sagittal")
# Numbers and words of ours tell volumes apart; other values of a header may name a person.
_SAFE = re.compile(rf"({'|'.join(_PARTS)}) [\d.]+( ms)?|{'|'.join(_PLANES)}|without \w+")


def open_volume(
    folder: Path, rule: str | None, *, allow_burned_in: bool, volume: str | None = None
) -> DicomSeries:
    """Open the only volume of a fetched series, or the one that a regular expression names.

    An error names no value of a header but sizes.
    """
    volumes = scan(folder).series
    used = {file for volume in volumes for file in volume.files}
    unused = len([file for file in folder.iterdir() if file not in used])
    # A missing first or last slice leaves no gap.
    require(not unused, f"{unused} of its objects cannot be read or are not images")
    series = choose_volume(volumes, rule, volume)
    require(rule or not series.is_localiser, "it is a localiser (ImageType); --series takes it")
    text = (series.burned_in or series.is_secondary_capture) and not allow_burned_in
    kind = (
        "has text (BurnedInAnnotation)" if series.burned_in else "is a secondary capture, which may have text"
    )
    require(not text, f"it {kind}; --allow-burned-in takes it")
    require(not series.problem, _unnamed(series.problem))
    require(series.affine is not None, "its slices do not say where they lie")
    require(not series.is_sheared, "its slices are sheared (a tilted gantry)")
    return series


def choose_volume(volumes: Sequence[DicomSeries], rule: str | None, volume: str | None) -> DicomSeries:
    """Return the only volume of a series, or the one that a regular expression names."""
    chosen = [*volumes] if len(volumes) == 1 else select(volumes, rule).chosen
    if len(volumes) > 1 and (pattern := compile_series(volume, "--volume")) is not None:
        chosen = [one for one in volumes if pattern.search(one.part)]
    if len(chosen) != 1:
        parts = [", ".join(part for part in one.part.split(", ") if _SAFE.fullmatch(part)) for one in volumes]
        known = first_of([part for part in dict.fromkeys(parts) if part], 6)
        raise ReaderError(
            f"the series holds {len(volumes)} volumes, expected one{f': {known}' if known else ''}; "
            "--volume REGEX chooses by b-value, echo, phase or time"
        )
    return chosen[0]


def load_on_grid(channels: Sequence[DicomSeries], grid: DicomSeries) -> list[np.ndarray]:
    """Load volumes, each (X, Y, Z) or in colour (X, Y, Z, 3), on the grid of one of them.

    A volume on the same grid keeps its voxels; others are interpolated linearly, with their lowest value
    outside of their field of view.
    """
    frames = {series.first.frame_of_reference for series in channels} - {""}
    require(len(frames) <= 1, "its channels lie in different frames of reference; register them first")
    with translated(ReaderError, to=lambda error: ReaderError(_unnamed(str(error)))):
        target = load_series(grid)
        images = [target if series is grid else load_series(series) for series in channels]
    grey = all(image.GetNumberOfComponentsPerPixel() == 1 for image in images)
    require(grey or len(images) == 1, "a channel is in colour; import it by itself")
    arrays = []
    for image in images:
        if not _same_grid(image, target):
            lowest = float(sitk.GetArrayViewFromImage(image).min())
            image = sitk.Resample(image, target, sitk.Transform(), sitk.sitkLinear, lowest)
        arrays.append(sitk.GetArrayFromImage(image).T)
    return [np.moveaxis(array, 0, -1) if array.ndim > target.GetDimension() else array for array in arrays]


def _unnamed(problem: str) -> str:
    """Return a problem without the name of a file, which may contain a patient's name."""
    return problem.partition("; look at")[0]


def _same_grid(one: sitk.Image, other: sitk.Image) -> bool:
    if one.GetSize() != other.GetSize():
        return False
    corners = np.concatenate([np.zeros((1, 3), int), np.diag(np.subtract(one.GetSize(), 1))])
    ends = [tuple(map(int, corner)) for corner in corners]
    points = map(one.TransformIndexToPhysicalPoint, ends)
    places = [other.TransformPhysicalPointToContinuousIndex(point) for point in points]
    return bool(np.abs(np.subtract(places, ends)).max() < _SAME_PLACE)


def write_nifti(path: Path, voxels: np.ndarray, affine: np.ndarray) -> None:
    """Write voxels, (X, Y, Z) or (X, Y, Z, C), atomically as NIfTI, readable only for their owner.

    Whole numbers of 16 bits are written as integers. The same voxels give the same bytes.
    """
    private_folder(path.parent)
    if voxels.dtype.kind == "f" and np.isfinite(voxels).all():
        whole = (voxels == np.rint(voxels)).all() and np.abs(voxels).max() < 2**15
        voxels = voxels.astype(np.int16) if whole else voxels
    image = nibabel.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    write_atomic(path, partial(pack_nifti, image), private=True)
