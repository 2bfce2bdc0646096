"""Label maps and probabilities as files: on the grid, and in the format, of the image that they belong to."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import SimpleITK as sitk
from PIL import Image
from torch import Tensor

from medfedaug.data.io.dicom_segmentation import Segments, write_segmentation
from medfedaug.data.io.photographs import is_photograph
from medfedaug.data.io.readers import NIFTI_SUFFIXES, image_suffix, is_dicom, itk_information
from medfedaug.errors import StorageError

__all__ = ["label_bits", "label_map_suffix", "parts", "write_label_map", "write_probabilities"]

# What of a NIfTI header says where the voxels lie. The rest may name a patient, or a file.
_GEOMETRY = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code"),
    *("quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("srow_x", "srow_y", "srow_z"),
)
_WHITE = 65535
_DETACHED = {"mhd": "zraw", "nhdr": "raw.gz"}
_VECTOR = re.compile(rb"\([^)]*\)")
_LONGEST_HEADER = 2**16  # bytes of an NRRD file's


def label_map_suffix(image: Path) -> str:
    """The suffix of the label map of an image: its own, ``.png`` for photographs, ``.dcm`` for DICOM."""
    if is_dicom(image):
        return ".dcm"
    return ".png" if is_photograph(image) else image_suffix(image.name)


def parts(name: str) -> list[str]:
    """The files of a label map: ``.mhd`` and ``.nhdr`` are headers, whose voxels are in another file."""
    stem, dot, suffix = name.rpartition(".")
    beside = _DETACHED.get(suffix.lower())
    return [name, stem + dot + beside] if beside else [name]


def label_bits(classes: int) -> int:
    """Bits of a label: 8, or 16 where there are more than 256 classes.

    Example:
        >>> label_bits(256), label_bits(257)
        (8, 16)
    """
    return 8 if classes <= 2**8 else 16


def write_label_map(target: Path, image: Path, label: Tensor, segments: Segments) -> None:
    """Write a label map with the geometry of its image; the file is complete or absent.

    NIfTI gets the bytes of the image's own header that say where voxels lie (sform, qform, their codes,
    units); MHA and NRRD its origin, spacing and direction; a photograph a grey image; a DICOM series
    a DICOM SEG that refers to its slices. Labels have `label_bits`.

    Args:
        target: the file, with the suffix of `label_map_suffix`.
        image: the image, of several files the first.
        label: (1, X, Y, Z), on the grid of the image.
        segments: the classes, and who predicted them, for DICOM.

    Raises:
        DataError: for a DICOM series that lacks what a SEG needs.
        StorageError: when the file cannot be written.
    """
    voxels = label[0].numpy().astype(f"uint{label_bits(len(segments.classes))}")
    if is_dicom(image):
        _write(target, lambda path: write_segmentation(path, image, voxels, segments))
    elif is_photograph(image):
        _write(target, lambda path: Image.fromarray(np.ascontiguousarray(voxels[..., 0].T)).save(path))
    elif image.name.lower().endswith(NIFTI_SUFFIXES):
        _write(target, lambda path: nibabel.save(_nifti(image, voxels), path))
    else:
        _write(target, lambda path: _save_itk(path, image, voxels.transpose(2, 1, 0), vector=False))


def write_probabilities(target: Path, image: Path, shares: Tensor, segments: Segments) -> None:
    """Write the probabilities of the classes beside a label map, in its format.

    NIfTI, MHA and NRRD hold all classes, background first, in float32. A photograph has a file for each,
    ``NAME_0.png``, ..., in which 65535 is 1. DICOM is a SEG of probabilities of the classes without the
    background, in steps of 1/255.

    Args:
        target: as for `write_label_map`.
        image: the same.
        shares: (K, X, Y, Z), float32.
        segments: the same.

    Raises:
        DataError: as `write_label_map`.
        StorageError: the same.
    """
    voxels = np.moveaxis(shares.numpy(), 0, -1)
    if is_dicom(image):
        _write(target, lambda path: write_segmentation(path, image, voxels, segments))
    elif is_photograph(image):
        for index, plane in enumerate(np.rint(voxels[:, :, 0] * _WHITE).astype(np.uint16).transpose(2, 1, 0)):
            single = target.with_name(f"{target.stem}_{index}{target.suffix}")
            _write(single, Image.fromarray(np.ascontiguousarray(plane)).save)
    elif image.name.lower().endswith(NIFTI_SUFFIXES):
        _write(target, lambda path: nibabel.save(_nifti(image, voxels), path))
    else:
        _write(target, lambda path: _save_itk(path, image, voxels.transpose(2, 1, 0, 3), vector=True))


def _nifti(image: Path, voxels: np.ndarray) -> Any:
    like: Any = nibabel.load(image)
    header = type(like.header)(endianness=like.header.endianness)
    for name in _GEOMETRY:
        header[name] = like.header[name]
    header.set_data_dtype(voxels.dtype)
    header.set_data_shape(voxels.shape)  # on which the affine of a header that says nothing depends
    # With the header's own affine, nothing of it is computed anew.
    return type(like)(voxels, header.get_best_affine(), header)


def _save_itk(path: Path, image: Path, voxels: np.ndarray, *, vector: bool) -> None:
    like, found = itk_information(image), sitk.GetImageFromArray(voxels, isVector=vector)
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


def _write(target: Path, save: Callable[[Path], Any]) -> None:
    """Let ``save`` write a file, which in some formats has two parts, and put it into its place when done."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as folder:
            save(folder / target.name)
            written = sorted(folder.iterdir(), key=lambda path: path.name == target.name)
            for path in written:  # the header of a detached volume last
                os.replace(path, target.parent / path.name)
    except OSError as error:
        raise StorageError(target, error) from error


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as folder:
        yield Path(folder)
