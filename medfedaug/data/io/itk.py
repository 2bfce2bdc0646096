"""MetaImage (MHA) and NRRD, by SimpleITK through MONAI; and MONAI's loader with SimpleITK's reader."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import SimpleITK as sitk
import torch
from monai.data import ImageReader, MetaTensor
from monai.transforms import EnsureChannelFirst, LoadImage
from monai.utils import MetaKeys, SpaceKeys, ensure_tuple

from medfedaug.data.io.base import Header, ImageFormat, volume_header
from medfedaug.data.io.dicom_series import load_series, open_series

if TYPE_CHECKING:
    from medfedaug.data.io.dicom_segmentation import Segments

__all__ = ["FORMAT", "SimpleITKReader", "load_with_monai"]

_SUFFIXES = (".mha", ".mhd", ".nrrd", ".nhdr")
_DETACHED = {"mhd": "zraw", "nhdr": "raw.gz"}
_RAW = re.compile(rb"(?im)^(?:ElementDataFile\s*=|data ?file:)\s*(.+?)\s*$")
_BLOCK = 2**20
_VECTOR = re.compile(rb"\([^)]*\)")
_LONGEST_HEADER = 2**16  # bytes of an NRRD file's


class ITKFormat(ImageFormat):
    """MetaImage and NRRD, each with its voxels in the same file or in one beside the header."""

    title = "MHA (.mha, .mhd), NRRD (.nrrd, .nhdr)"
    suffixes = _SUFFIXES
    voxel_suffixes = (".raw", ".zraw", ".raw.gz")

    def read_header(self, path: Path) -> Header:
        """Read the header, without the voxels."""
        try:
            reader = _information(path)
        except RuntimeError as error:
            raise ValueError(_reason(error)) from error
        kind = sitk.GetPixelIDValueAsString(reader.GetPixelID())
        if "complex" in kind:
            raise ValueError(f"voxels of the type {kind}, and real numbers were expected")
        size = reader.GetSize()
        affine = _ras(reader.GetDirection(), reader.GetSpacing(), reader.GetOrigin())
        components = reader.GetNumberOfComponents()
        return volume_header(size if components == 1 else (*size, components), affine)

    def read_volume(self, path: Path) -> torch.Tensor:
        """Read the voxels."""
        return load_with_monai(path)

    def voxel_files(self, path: Path) -> list[Path]:
        """Return the file that a detached header names."""
        if path.suffix.lower() not in (".mhd", ".nhdr"):
            return [path]
        match = _RAW.search(path.read_bytes()[:_BLOCK])
        return [path.parent / match[1].decode(errors="replace")] if match else []

    def label_suffix(self, image: Path) -> str:
        """Return the image's own suffix, as it is written there."""
        return self.own_suffix(image)

    def parts(self, label: str) -> list[str]:
        """Return the names of header and voxels: of ``.mhd`` and ``.nhdr`` they are two files."""
        stem, dot, suffix = label.rpartition(".")
        beside = _DETACHED.get(suffix.lower())
        return [label, stem + dot + beside] if beside else [label]

    def write_label_map(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write a label map with the image's origin, spacing and direction."""
        _save(path, image, voxels.transpose(2, 1, 0), vector=False)

    def write_probabilities(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write the probabilities as a vector for each voxel."""
        _save(path, image, voxels.transpose(2, 1, 0, 3), vector=True)


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
        """Return whether files are DICOM, or of ITK's own formats."""
        from medfedaug.data.io.formats import is_dicom

        return all(
            str(name).lower().endswith(_SUFFIXES) or is_dicom(Path(name)) for name in ensure_tuple(filename)
        )

    def read(self, data: Any, **kwargs: Any) -> sitk.Image:
        """Read one volume; that of a DICOM series in the units of its modality.

        Raises:
            ValueError: for a file that SimpleITK cannot read, or what is not one whole DICOM series.
        """
        from medfedaug.data.io.formats import is_dicom

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


def load_with_monai(path: Path) -> torch.Tensor:
    """Read a volume with its affine, by the reader of its format.

    Raises:
        Exception: whatever the reader raises, `ValueError` for what is not a volume.
    """
    image = cast(MetaTensor, EnsureChannelFirst()(_loader()(path)))
    if image.ndim != 4:
        raise ValueError(f"{image.ndim - 1}-dimensional, a volume was expected")
    return image


@cache
def _loader() -> LoadImage:
    # Where pydicom is installed, MONAI also tries a reader for GPUs, and tells twice that there is none.
    logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="NvImgCodecPydicomReader")
        loader = LoadImage(image_only=True, dtype=np.float32)
    loader.register(SimpleITKReader())  # asked first, and says no to NIfTI
    return loader


def _save(path: Path, image: Path, voxels: np.ndarray, *, vector: bool) -> None:
    like, found = _information(image), sitk.GetImageFromArray(voxels, isVector=vector)
    dimension = like.GetDimension()  # 4 where the last axis holds channels
    found.SetSpacing(like.GetSpacing()[:3])
    found.SetOrigin(like.GetOrigin()[:3])
    found.SetDirection(np.reshape(like.GetDirection(), (dimension, dimension))[:3, :3].ravel().tolist())
    try:
        sitk.WriteImage(found, str(path), useCompression=True)
    except RuntimeError as error:
        raise OSError(str(error).strip().splitlines()[-1]) from error
    if path.suffix.lower() in (".nrrd", ".nhdr"):
        _keep_geometry(path, image)


def _keep_geometry(path: Path, image: Path) -> None:
    """Write an NRRD file's geometry as the image has it.

    The format has directions times spacing, which ITK takes apart and puts together again with a rounding.
    """
    with image.open("rb") as file:
        like = file.read(_LONGEST_HEADER).replace(b"\r\n", b"\n").partition(b"\n\n")[0].split(b"\n")
    own = {line.partition(b":")[0].lower(): line for line in like}
    vectors = _VECTOR.findall(own.get(b"space directions", b""))
    if len(vectors) != 3 or b"space origin" not in own or b"space" not in own:
        return
    header, end, data = path.read_bytes().partition(b"\n\n")
    rest = iter(vectors)
    lines = []
    for line in header.split(b"\n"):
        name = line.partition(b":")[0].lower()
        if name == b"space directions":  # beside what stands for the channels
            line = _VECTOR.sub(lambda _: next(rest), line)
        lines.append(own[name] if name in (b"space", b"space origin") else line)
    path.write_bytes(b"\n".join(lines) + end + data)


def _information(path: str | Path) -> sitk.ImageFileReader:
    """Read the header of a file, without its voxels."""
    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    return reader


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


FORMAT = ITKFormat()
