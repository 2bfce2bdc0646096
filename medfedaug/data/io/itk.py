"""MetaImage (MHA) and NRRD, by SimpleITK."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medfedaug.data.io.base import Header, ImageFormat, Segments, channels_first, volume_header

if TYPE_CHECKING:
    import SimpleITK as sitk

_DETACHED = {"mhd": "zraw", "nhdr": "raw.gz"}
_RAW = re.compile(rb"(?im)^(?:ElementDataFile\s*=|data ?file:)\s*(.+?)\s*$")
_BLOCK = 2**20
_VECTOR = re.compile(rb"\([^)]*\)")
_LONGEST_HEADER = 2**16  # bytes of an NRRD file's


class ITKFormat(ImageFormat):
    """MetaImage and NRRD, each with its voxels in the file of the header or in another."""

    title = "MHA (.mha, .mhd), NRRD (.nrrd, .nhdr)"
    suffixes = (".mha", ".mhd", ".nrrd", ".nhdr")
    voxel_suffixes = (".raw", ".zraw", ".raw.gz")

    def read_header(self, path: Path) -> Header:
        from SimpleITK import GetPixelIDValueAsString

        try:
            reader = _information(path)
        except RuntimeError as error:
            raise ValueError(_reason(error)) from error
        kind = GetPixelIDValueAsString(reader.GetPixelID())
        if "complex" in kind:
            raise ValueError(f"has voxels of type {kind}, expected real numbers")
        size = reader.GetSize()
        affine = ras_affine(reader.GetDirection(), reader.GetSpacing(), reader.GetOrigin())
        components = reader.GetNumberOfComponents()
        return volume_header(size if components == 1 else (*size, components), affine)

    def read_volume(self, path: Path) -> np.ndarray:
        return channels_first(array_of(read_image(path)))

    def voxel_files(self, path: Path) -> list[Path]:
        """Return the file that a detached header names."""
        if path.suffix.lower() not in (".mhd", ".nhdr"):
            return [path]
        match = _RAW.search(path.read_bytes()[:_BLOCK])
        return [path.parent / match[1].decode(errors="replace")] if match else []

    def label_suffix(self, image: Path) -> str:
        return self.own_suffix(image)

    def parts(self, label: str) -> list[str]:
        """Return the names of header and voxels, two files for ``.mhd`` and ``.nhdr``."""
        stem, _, suffix = label.rpartition(".")
        voxels = _DETACHED.get(suffix.lower())
        return [label, f"{stem}.{voxels}"] if voxels else [label]

    def write_label_map(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write a label map with the image's origin, spacing and direction."""
        _save(path, image, voxels.transpose(2, 1, 0), vector=False)

    def write_probabilities(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write the probabilities as a vector for each voxel."""
        _save(path, image, voxels.transpose(2, 1, 0, 3), vector=True)


def read_image(path: Path) -> sitk.Image:
    """Read an image with its voxels."""
    from SimpleITK import ReadImage

    try:
        return ReadImage(str(path))
    except RuntimeError as error:
        raise ValueError(_reason(error)) from error


def array_of(image: sitk.Image) -> np.ndarray:
    """Return the voxels of an image, (x, y, z) or (x, y, z, channel); SimpleITK has (z, y, x, channel)."""
    from SimpleITK import GetArrayFromImage

    dimension = image.GetDimension()
    rest = range(dimension, dimension + (image.GetNumberOfComponentsPerPixel() > 1))
    return GetArrayFromImage(image).transpose(*reversed(range(dimension)), *rest)


def _save(path: Path, image: Path, voxels: np.ndarray, *, vector: bool) -> None:
    import SimpleITK as sitk

    reader = _information(image)
    output = sitk.GetImageFromArray(voxels, isVector=vector)
    dimension = reader.GetDimension()  # 4 where the last axis holds channels
    output.SetSpacing(reader.GetSpacing()[:3])
    output.SetOrigin(reader.GetOrigin()[:3])
    output.SetDirection(np.reshape(reader.GetDirection(), (dimension, dimension))[:3, :3].ravel().tolist())
    try:
        sitk.WriteImage(output, str(path), useCompression=True)
    except RuntimeError as error:
        raise OSError(str(error).strip().splitlines()[-1]) from error
    if path.suffix.lower() in (".nrrd", ".nhdr"):
        _keep_geometry(path, image)


def _keep_geometry(path: Path, image: Path) -> None:
    """Copy the image's geometry into an NRRD file byte by byte.

    The format stores directions times spacing, which ITK takes apart and multiplies again with a rounding.
    """
    with image.open("rb") as file:
        source = file.read(_LONGEST_HEADER).replace(b"\r\n", b"\n").partition(b"\n\n")[0].split(b"\n")
    fields = {line.partition(b":")[0].lower(): line for line in source}
    vectors = _VECTOR.findall(fields.get(b"space directions", b""))
    if len(vectors) != 3 or b"space origin" not in fields or b"space" not in fields:
        return
    header, end, data = path.read_bytes().partition(b"\n\n")
    remaining = iter(vectors)
    lines = []
    for line in header.split(b"\n"):
        name = line.partition(b":")[0].lower()
        if name == b"space directions":  # keep ``none``, the direction of channels
            line = _VECTOR.sub(lambda _: next(remaining), line)
        lines.append(fields[name] if name in (b"space", b"space origin") else line)
    path.write_bytes(b"\n".join(lines) + end + data)


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


def _reason(error: Exception) -> str:
    """Return the message of SimpleITK's exception, without references to its source code."""
    text = str(error).partition("ERROR: ")[2] or str(error)
    return re.sub(r"^\w+\(0x\w+\): ", "", text.strip().split("\n")[0])


FORMAT = ITKFormat()
