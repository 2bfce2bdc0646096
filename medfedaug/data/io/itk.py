"""MetaImage (MHA) and NRRD, by SimpleITK."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medfedaug.data.io.base import Header, ImageFormat, Segments, channels_first, volume_header
from medfedaug.errors import translated

if TYPE_CHECKING:
    import SimpleITK as sitk

_WHOLE = {".mhd": ".mha", ".nhdr": ".nrrd"}
"""Suffixes of headers with voxels in another file, and of the format's single files."""

_RAW = re.compile(rb"(?im)^(?:ElementDataFile\s*=|data ?file:)\s*(.+?)\s*$")
_BLOCK = 2**20


class ITKFormat(ImageFormat):
    """MetaImage and NRRD, each with its voxels in the file of the header or in another."""

    title = "MHA (.mha, .mhd), NRRD (.nrrd, .nhdr)"
    suffixes = (".mha", ".mhd", ".nrrd", ".nhdr")
    voxel_suffixes = (".raw", ".zraw", ".raw.gz")

    def read_header(self, path: Path) -> Header:
        with _readable():
            reader = _information(path)
        size = reader.GetSize()
        affine = ras_affine(reader.GetDirection(), reader.GetSpacing(), reader.GetOrigin())
        components = reader.GetNumberOfComponents()
        return volume_header(size if components == 1 else (*size, components), affine)

    def read_volume(self, path: Path) -> np.ndarray:
        """Read a volume; SimpleITK has the axes (z, y, x, channel)."""
        from SimpleITK import GetArrayFromImage, ReadImage

        with _readable():
            image = ReadImage(str(path))
        dimension = image.GetDimension()
        channel = range(dimension, dimension + (image.GetNumberOfComponentsPerPixel() > 1))
        voxels: np.ndarray = GetArrayFromImage(image).transpose(*reversed(range(dimension)), *channel)
        return channels_first(voxels)

    def voxel_files(self, path: Path) -> list[Path]:
        """Return the file that a detached header names."""
        if path.suffix.lower() not in (".mhd", ".nhdr"):
            return [path]
        match = _RAW.search(path.read_bytes()[:_BLOCK])
        return [path.parent / match[1].decode(errors="replace")] if match else []

    def label_suffix(self, image: Path) -> str:
        suffix = self.own_suffix(image)
        return _WHOLE.get(suffix.lower(), suffix)

    def write_label_map(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write a label map with the image's origin, spacing and direction."""
        _save(path, image, voxels.transpose(2, 1, 0), vector=False)

    def write_probabilities(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write the probabilities as a vector for each voxel."""
        _save(path, image, voxels.transpose(2, 1, 0, 3), vector=True)


def _save(path: Path, image: Path, voxels: np.ndarray, *, vector: bool) -> None:
    import SimpleITK as sitk

    reader = _information(image)
    output = sitk.GetImageFromArray(voxels, isVector=vector)
    dimension = reader.GetDimension()  # 4 where the last axis holds channels
    output.SetSpacing(reader.GetSpacing()[:3])
    output.SetOrigin(reader.GetOrigin()[:3])
    output.SetDirection(np.reshape(reader.GetDirection(), (dimension, dimension))[:3, :3].ravel().tolist())
    with _readable():
        sitk.WriteImage(output, str(path), useCompression=True)


def _information(path: Path) -> sitk.ImageFileReader:
    """Read the header of a file, without its voxels."""
    from SimpleITK import ImageFileReader

    reader = ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    return reader


def ras_affine(direction: Sequence[float], spacing: Sequence[float], origin: Sequence[float]) -> np.ndarray:
    """Return the affine from voxel indices to RAS, from ITK's LPS; leave out a fourth dimension."""
    dimension = len(spacing)
    rank = min(dimension, 3)
    affine = np.eye(rank + 1)
    affine[:rank, :rank] = np.reshape(direction, (dimension, dimension))[:rank, :rank] * spacing[:rank]
    affine[:rank, rank] = origin[:rank]
    affine[:2] *= -1
    return affine


def _readable() -> AbstractContextManager[None]:
    """Replace SimpleITK's error by one without references to its source code."""

    def plain(error: RuntimeError) -> OSError:
        text = str(error).partition("ERROR: ")[2] or str(error)
        return OSError(re.sub(r"^\w+\(0x\w+\): ", "", text.strip().split("\n")[0]))

    return translated(RuntimeError, to=plain)


FORMAT = ITKFormat()
