"""Volumes from files: NIfTI by nibabel, MHA, NRRD and DICOM series by SimpleITK, through MONAI; photographs.

Whatever the format, voxels are indexed (x, y, z) as they are stored and the affine takes these indices to
millimetres in RAS, so that one volume gives the same array and the same affine in each. A photograph is a
volume of one slice without an affine.
"""

from __future__ import annotations

import logging
import re
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

import nibabel
import numpy as np
import SimpleITK as sitk
import torch
from monai.data import ImageReader, MetaTensor
from monai.transforms import EnsureChannelFirst, LoadImage
from monai.utils import MetaKeys, SpaceKeys, ensure_tuple

from medfedaug.data.io.dicom_series import load_series, open_series
from medfedaug.data.io.nifti_header import check_gzip, check_nifti_header
from medfedaug.data.io.photographs import (
    PHOTOGRAPH_SUFFIXES,
    is_photograph,
    load_label_photograph,
    load_photograph,
    photograph_header,
)
from medfedaug.data.io.voxel_files import file_states

__all__ = [
    "IMAGE_SUFFIXES",
    "NIFTI_SUFFIXES",
    "Header",
    "SimpleITKReader",
    "image_suffix",
    "is_dicom",
    "itk_information",
    "load_label",
    "load_volume",
    "read_header",
]

NIFTI_SUFFIXES = (".nii.gz", ".nii")
_ITK = (".mha", ".mhd", ".nrrd", ".nhdr")
IMAGE_SUFFIXES = (*NIFTI_SUFFIXES, *_ITK, *PHOTOGRAPH_SUFFIXES)

# By the code in a NIfTI header. Nothing that reads it through MONAI would see the difference.
_NO_MILLIMETRES = {1: "metres", 3: "micrometres"}

_UPRIGHT = float(np.cos(np.deg2rad(20)))


@dataclass(frozen=True, eq=False)
class Header:
    """The properties of a volume that are known without decoding it.

    Args:
        shape: voxels along x, y and z.
        channels: values of one voxel.
        affine: (4, 4), from voxel indices to millimetres in RAS; ``None`` where the file does not say.
        white: the intensity that stands for white in a photograph; ``None`` for a volume, which has no fixed
            scale.
    """

    shape: tuple[int, ...]
    channels: int
    affine: np.ndarray | None
    white: int | None = None

    @property
    def axes(self) -> str:
        """Where x, y and z point to, for instance ``"RAS"``; empty where the file does not say."""
        return "" if self.affine is None else "".join(map(str, nibabel.aff2axcodes(self.affine)))

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of a voxel, mm; empty where the file does not say."""
        return () if self.affine is None else tuple(np.linalg.norm(self.affine[:3, :3], axis=0).tolist())

    @property
    def upright_axes(self) -> str:
        """`axes`, where each is within 20 degrees of what it is called; else empty."""
        if self.affine is None or not all(self.edges):
            return ""
        nearest = np.abs(self.affine[:3, :3] / self.edges).max(axis=0)
        return self.axes if nearest.min() > _UPRIGHT else ""

    def distance(self, other: Header) -> float:
        """How far the volume's corners are at most from where another header of its shape puts them, mm.

        0 where one of the two does not say where it lies.
        """
        if self.affine is None or other.affine is None:
            return 0.0
        corners = np.array([(*corner, 1) for corner in product(*((0, n - 1) for n in self.shape))])
        apart = corners @ (self.affine - other.affine).T
        return float(np.linalg.norm(apart[:, :3], axis=1).max())


class SimpleITKReader(ImageReader):
    """Reads MHA, NRRD, and a DICOM series by its folder or a file of it, for `monai.transforms.LoadImage`.

    MONAI's `ITKReader` needs the package itk; this one needs SimpleITK. As with MONAI's `NibabelReader` the
    array is indexed (x, y, z) or (x, y, z, channel), and the affine is in RAS.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "image.mha"
        >>> sitk.WriteImage(sitk.GetImageFromArray(np.zeros((3, 4, 5), np.float32)), path)
        >>> image = LoadImage(reader=SimpleITKReader())(path)
        >>> tuple(image.shape), image.affine.diagonal().tolist()
        ((5, 4, 3), [-1.0, -1.0, 1.0, 1.0])
    """

    def verify_suffix(self, filename: Any) -> bool:
        """Whether it is DICOM, or a file of ITK's own formats."""
        return all(
            str(name).lower().endswith(_ITK) or is_dicom(Path(name)) for name in ensure_tuple(filename)
        )

    def read(self, data: Any, **kwargs: Any) -> sitk.Image:
        """Read one volume; that of a DICOM series in the units of its modality.

        Raises:
            ValueError: for a file that SimpleITK cannot read, or what is not one whole DICOM series.
        """
        (name,) = ensure_tuple(data)
        path = Path(name)
        try:
            return load_series(open_series(path)) if is_dicom(path) else sitk.ReadImage(str(path))
        except RuntimeError as error:
            raise ValueError(_reason(error)) from error

    def get_data(self, img: sitk.Image) -> tuple[np.ndarray, dict[str, Any]]:
        """The array and its meta data: affine, spatial shape and channel dimension."""
        vector = img.GetNumberOfComponentsPerPixel() > 1
        dimension = img.GetDimension()
        # SimpleITK's arrays are (z, y, x) or (z, y, x, channel).
        array = sitk.GetArrayFromImage(img).transpose(
            *reversed(range(dimension)), *range(dimension, dimension + vector)
        )
        affine = _ras(img.GetDirection(), img.GetSpacing(), img.GetOrigin())
        return array, {
            MetaKeys.AFFINE: affine,
            MetaKeys.ORIGINAL_AFFINE: affine.copy(),
            MetaKeys.SPATIAL_SHAPE: np.asarray(array.shape[:3]),
            MetaKeys.SPACE: SpaceKeys.RAS,
            MetaKeys.ORIGINAL_CHANNEL_DIM: -1 if vector or dimension > 3 else float("nan"),
        }


def image_suffix(name: str) -> str:
    """Which of `IMAGE_SUFFIXES` a file's name ends with, as it is written there; empty for none."""
    known = next((suffix for suffix in IMAGE_SUFFIXES if name.lower().endswith(suffix)), "")
    return name[len(name) - len(known) :]


def load_volume(path: Path) -> torch.Tensor:
    """A volume as it is stored, float32 of shape (C, X, Y, Z), with its affine; a photograph without, Z = 1.

    Raises:
        Exception: whatever the reader raises, `ValueError` for what is not a volume;
            `medfedaug.data.base.unreadable` makes one line of it.
    """
    if is_photograph(path):
        return load_photograph(path)
    if str(path).lower().endswith(".nii.gz"):
        check_gzip(path, hash(file_states([path])))
    image = cast(MetaTensor, EnsureChannelFirst()(_loader()(path)))
    if image.ndim != 4:
        raise ValueError(f"{image.ndim - 1}-dimensional, a volume was expected")
    return image


def load_label(path: Path) -> torch.Tensor:
    """A label map, float32: (1, X, Y, Z), or (C, X, Y, Z) of a volume that has channels.

    Raises:
        Exception: as `load_volume`, and for a label image in colour.
    """
    return load_label_photograph(path) if is_photograph(path) else load_volume(path)


@cache
def _loader() -> LoadImage:
    # Where pydicom is installed, MONAI also tries a reader for GPUs, and tells twice that there is none.
    logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="NvImgCodecPydicomReader")
        loader = LoadImage(image_only=True, dtype=np.float32)
    loader.register(SimpleITKReader())  # asked first, and says no to NIfTI
    return loader


def read_header(path: Path) -> Header:
    """Read a volume's properties without decoding it.

    A NIfTI file that seems to be cut short is decoded after all, to be sure. What was asked for before is not
    opened again, unless one of its files was written anew.

    Raises:
        Exception: as `load_volume`.
    """
    return _read_header(path, hash(file_states([path])))


@lru_cache(maxsize=2**14)
def _read_header(path: Path, state: int) -> Header:
    if is_photograph(path):
        seen = photograph_header(path)
        return Header((seen.width, seen.height, 1), seen.channels, None, seen.white)
    if str(path).lower().endswith(NIFTI_SUFFIXES):
        return _nifti_header(path)
    if is_dicom(path):
        series = open_series(path)
        return _header(
            series.shape if series.channels == 1 else (*series.shape, series.channels), series.affine
        )
    try:
        reader = itk_information(path)
    except RuntimeError as error:
        raise ValueError(_reason(error)) from error
    kind = sitk.GetPixelIDValueAsString(reader.GetPixelID())
    if "complex" in kind:
        raise ValueError(f"voxels of the type {kind}, and real numbers were expected")
    size = reader.GetSize()
    affine = _ras(reader.GetDirection(), reader.GetSpacing(), reader.GetOrigin())
    components = reader.GetNumberOfComponents()
    return _header(size if components == 1 else (*size, components), affine)


def _nifti_header(path: Path) -> Header:
    image = cast(nibabel.Nifti1Image, nibabel.load(path))
    voxels = cast(Any, image.dataobj)
    if voxels.dtype.kind not in "biuf":
        raise ValueError(f"voxels of the type {voxels.dtype}, and numbers were expected")
    promised = voxels.offset + prod(image.shape) * voxels.dtype.itemsize
    if _stored_bytes(path) != promised % 2**32:
        np.asanyarray(voxels)  # raises where voxels are missing
    check_nifti_header(path, image)
    if unit := _NO_MILLIMETRES.get(int(image.header["xyzt_units"]) & 7):
        raise ValueError(f"its header measures in {unit}, and millimetres were expected")
    says = image.header["sform_code"] > 0 or image.header["qform_code"] > 0
    return _header(image.shape, image.affine if says else None)


def _stored_bytes(path: Path) -> int:
    """The size of a file before compression, modulo 2**32, from gzip's last four bytes."""
    if not path.name.lower().endswith(".gz"):
        return path.stat().st_size % 2**32
    with open(path, "rb") as file:
        file.seek(-4, 2)
        return int(struct.unpack("<I", file.read(4))[0])


def _header(shape: Sequence[int], affine: np.ndarray | None) -> Header:
    if len(shape) not in (3, 4):
        raise ValueError(f"{len(shape)}-dimensional, a volume was expected")
    if min(shape) < 1:
        raise ValueError(f"{' x '.join(map(str, shape))} voxels")
    if affine is not None and not (np.isfinite(affine).all() and np.linalg.det(affine)):
        raise ValueError("its header gives it no place: the affine is singular or not finite")
    return Header(tuple(map(int, shape[:3])), int(shape[3]) if len(shape) > 3 else 1, affine)


def itk_information(path: str | Path) -> sitk.ImageFileReader:
    """What the header of a file says, without its voxels."""
    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    return reader


def is_dicom(path: Path) -> bool:
    """Whether an image is DICOM, by its name: a folder, or a file without a suffix of another format."""
    return path.is_dir() or not image_suffix(path.name)


def _ras(direction: Sequence[float], spacing: Sequence[float], origin: Sequence[float]) -> np.ndarray:
    """The affine from voxel indices to RAS coordinates, from ITK's LPS; a fourth dimension is left out."""
    dimension = len(spacing)
    rank = min(dimension, 3)
    affine = np.eye(rank + 1)
    affine[:rank, :rank] = np.reshape(direction, (dimension, dimension))[:rank, :rank] * spacing[:rank]
    affine[:rank, rank] = origin[:rank]
    affine[:2] *= -1
    return affine


def _reason(error: Exception) -> str:
    """The message of SimpleITK's exception, without references to its own source code."""
    said = str(error).partition("ERROR: ")[2] or str(error)
    return re.sub(r"^\w+\(0x\w+\): ", "", said.strip().split("\n")[0])
