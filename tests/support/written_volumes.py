"""One volume, as writers of each format write it."""

import locale
from contextlib import contextmanager
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch

from medfedaug.data.io.formats import format_of

SHAPE = (7, 6, 5)


def load_volume(path: Path) -> torch.Tensor:
    return torch.as_tensor(format_of(path).read_volume(path))


def load_label(path: Path) -> torch.Tensor:
    return torch.as_tensor(format_of(path).read_label(path))


def turn(x: float, y: float, z: float) -> np.ndarray:
    """A rotation about all three axes."""
    (a, b, c), (d, e, f) = np.cos([x, y, z]), np.sin([x, y, z])
    return (
        np.array([[1, 0, 0], [0, a, -d], [0, d, a]])
        @ np.array([[b, 0, e], [0, 1, 0], [-e, 0, b]])
        @ np.array([[c, -f, 0], [f, c, 0], [0, 0, 1]])
    )


# To left and posterior, as scanners write it, oblique, with three different spacings: RAS millimetres.
AFFINE = np.eye(4)
AFFINE[:3, :3] = turn(0.2, -0.1, 0.15) @ np.diag([-0.8, -1.25, 3.0])
AFFINE[:3, 3] = (31.5, -12.25, 7.0)


@pytest.fixture(scope="module")
def voxels() -> np.ndarray:
    return np.random.default_rng(0).integers(-100, 900, SHAPE).astype(np.int16)


def itk_image(voxels: np.ndarray, affine: np.ndarray = AFFINE) -> sitk.Image:
    """The image in ITK's terms, from the definition of its world: LPS, that is RAS with x and y turned."""
    lps = np.diag([-1, -1, 1, 1]) @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image = sitk.GetImageFromArray(
        voxels.transpose(2, 1, 0, *range(3, voxels.ndim)), isVector=voxels.ndim > 3
    )
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    return image


@contextmanager
def same_locale():
    """GDCM's writer (its reader does not) leaves the whole process in the locale "C", where text is ASCII."""
    before = locale.setlocale(locale.LC_ALL)
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, before)


@same_locale()
def write_dicom(folder: Path, image: sitk.Image, series: str = "1.2.3", leave_out: int | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    d = image.GetDirection()
    for z in range(image.GetDepth()):
        if z == leave_out:
            continue
        piece = image[:, :, z]
        tags = {
            "0008|0060": "MR",
            "0008|0018": f"{series}.{z + 1}",
            "0020|000d": "1.2",
            "0020|000e": series,
            "0020|0013": str(z + 1),
            "0020|0032": "\\".join(map(str, image.TransformIndexToPhysicalPoint((0, 0, z)))),
            "0020|0037": "\\".join(map(str, (d[0], d[3], d[6], d[1], d[4], d[7]))),
            "0028|1052": "0",
            "0028|1053": "1",
        }
        for tag, value in tags.items():
            piece.SetMetaData(tag, value)
        # Named against the order of the slices, as archives do.
        writer.SetFileName(str(folder / f"{series}-{90 - z}.dcm"))
        writer.Execute(piece)
    return folder


def write(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith((".nii", ".nii.gz")):
        nibabel.save(nibabel.Nifti1Image(voxels, affine), path)
    elif path.suffix:
        sitk.WriteImage(itk_image(voxels, affine), str(path), useCompression="small" in path.name)
    else:
        write_dicom(path, itk_image(voxels, affine))
    return path
