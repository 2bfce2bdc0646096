"""NIfTI, by nibabel."""

from __future__ import annotations

import gzip
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from medfedaug.data.io.base import (
    Header,
    ImageFormat,
    Segments,
    channels_first,
    file_state,
    problem_of_edges,
    save_nifti,
    volume_header,
)

if TYPE_CHECKING:
    import nibabel

_BLOCK = 2**20
_NO_MILLIMETRES = {1: "metres", 3: "micrometres"}  # codes of units, which MONAI's reader ignores
# Fields of the geometry. Other fields of a header may name a patient, or a file.
_GEOMETRY = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code"),
    *("quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("srow_x", "srow_y", "srow_z"),
)


class Nifti(ImageFormat):
    """NIfTI files, compressed or not."""

    title = "NIfTI (.nii, .nii.gz)"
    suffixes = (".nii.gz", ".nii")

    def read_header(self, path: Path) -> Header:
        """Read the header; decode a file that seems to be cut short, to be sure."""
        image = _opened(path)
        voxels = cast(Any, image.dataobj)
        promised = voxels.offset + prod(image.shape) * voxels.dtype.itemsize
        if _stored_bytes(path) != promised % 2**32:
            np.asanyarray(voxels)  # raises where voxels are missing
        placed = image.header["sform_code"] > 0 or image.header["qform_code"] > 0
        header = volume_header(image.shape, image.affine if placed else None)
        unit = _NO_MILLIMETRES.get(int(image.header["xyzt_units"]) & 7)
        problem = f"its header measures in {unit}, expected millimetres" if unit else ""
        if problem := problem or problem_of_edges(header.edges):
            raise ValueError(problem)
        return header

    def read_volume(self, path: Path) -> np.ndarray:
        """Read the voxels, after the checksum of a compressed file."""
        if path.name.lower().endswith(".gz"):
            _check_gzip(path, hash(file_state(path)))
        return channels_first(np.asanyarray(cast(Any, _opened(path).dataobj)))

    def label_suffix(self, image: Path) -> str:
        return self.own_suffix(image)

    def write_label_map(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write voxels with the bytes of the geometry in the image's header."""
        source: Any = _opened(image)
        header = type(source.header)(endianness=source.header.endianness)
        for name in _GEOMETRY:
            header[name] = source.header[name]
        header.set_data_dtype(voxels.dtype)
        header.set_data_shape(voxels.shape)  # the affine of a header without geometry depends on it
        # The header's own affine keeps nibabel from computing a new one.
        save_nifti(type(source)(voxels, header.get_best_affine(), header), path)


def _stored_bytes(path: Path) -> int:
    """Return the size of a file before compression, modulo 2**32, from the last four bytes of gzip."""
    if not path.name.lower().endswith(".gz"):
        return path.stat().st_size % 2**32
    with path.open("rb") as file:
        file.seek(-4, 2)
        return int.from_bytes(file.read(4), "little")


@lru_cache(maxsize=2**14)
def _check_gzip(path: Path, state: int) -> None:
    """Check the checksum of a compressed file, which a reader does not reach, once for each version."""
    with gzip.open(path, "rb") as file:
        while file.read(_BLOCK):
            pass


def _opened(path: Path) -> nibabel.Nifti1Image:
    import nibabel

    return cast("nibabel.Nifti1Image", nibabel.load(path))


FORMAT = Nifti()
