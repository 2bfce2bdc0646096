"""Checks of a NIfTI file: readers accept a header that contradicts itself silently."""

from __future__ import annotations

import gzip
import struct
import zlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from medfedaug.data.io.base import file_state
from medfedaug.data.io.bounds import check_edges, check_intercept, check_slope, edges_text, plausible_edges
from medfedaug.errors import warn

if TYPE_CHECKING:
    import nibabel

_SHEAR = 0.02  # cosine between two axes: beyond rounding, and too large to ignore in turning a volume
_BLOCK = 2**20


def check_nifti_header(path: Path, image: nibabel.Nifti1Image, promised: int) -> None:
    """Check that a header does not contradict itself, and that a scanner can have written its numbers.

    A fault that changes the voxels is an error; any other is a warning.
    """
    raw = _raw_header(path, image)
    bits, wanted = int(raw["bitpix"]), 8 * int(raw.get_data_dtype().itemsize)
    if bits != wanted:
        raise ValueError(f"its header says {bits} bits a voxel (bitpix), and its datatype has {wanted}")
    slope, inter = float(raw["scl_slope"]), float(raw["scl_inter"])
    # Readers do not scale by a slope of 0 or NaN.
    scaled = bool(slope) and slope == slope
    if scaled:
        check_slope("scl_slope", slope)
    if scaled or inter == inter:
        check_intercept("scl_inter", inter)
    _check_geometry(path, raw, image)
    if (excess := _length(path, promised) - promised) > 0:
        sides = " x ".join(map(str, image.shape))
        warn(f"has {excess} bytes more than the {sides} voxels of its header: are these all?", path=path)


def _check_geometry(path: Path, raw: Any, image: nibabel.Nifti1Image) -> None:
    """Check the edges of a voxel, and the angles between the axes."""
    pixdim = [float(edge) for edge in raw["pixdim"][1:4]][: len(image.shape)]
    if raw["sform_code"] <= 0 and raw["qform_code"] <= 0:
        if not plausible_edges(map(abs, pixdim)):
            warn(
                f"its header has voxels of {edges_text(pixdim)} mm (pixdim), and does not say where they lie",
                path=path,
            )
        return
    matrix = cast(np.ndarray, image.affine)[:3, :3]
    edges = np.linalg.norm(matrix, axis=0)
    if not np.isfinite(edges).all() or not edges.all():
        return  # the reader refuses it
    check_edges(edges)
    if not (np.abs(np.abs(pixdim) - edges[: len(pixdim)]) <= 0.01 * edges[: len(pixdim)]).all():
        warn(
            f"its header contradicts itself: voxels of {edges_text(pixdim)} mm (pixdim) and of "
            f"{edges_text(edges)} mm (affine), which counts",
            path=path,
        )
    cosines = np.abs(np.triu((matrix / edges).T @ (matrix / edges), 1))
    if cosines.max() > _SHEAR:
        angle = np.degrees(np.arccos(min(cosines.max(), 1.0)))
        warn(
            f"its axes are not at right angles ({angle:.0f} degrees): sizes in mm are not right",
            path=path,
            hint="Resample it to a grid with right angles.",
        )


def _raw_header(path: Path, image: nibabel.Nifti1Image) -> Any:
    """Read the header as it is in the file; nibabel repairs its copy where it contradicts itself."""
    kind = type(image.header)
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    with opener(path, "rb") as file:
        block = file.read(kind.template_dtype.itemsize)
    return kind(block, check=False)


def stored_bytes(path: Path) -> int:
    """Return the size of a file before compression, modulo 2**32, from the last four bytes of gzip."""
    if not path.name.lower().endswith(".gz"):
        return path.stat().st_size % 2**32
    with path.open("rb") as file:
        file.seek(-4, 2)
        return int(struct.unpack("<I", file.read(4))[0])


def _length(path: Path, promised: int) -> int:
    """Return the size of a file before compression; read all of it only where its end has another number."""
    if not path.name.lower().endswith(".gz"):
        return path.stat().st_size
    if stored_bytes(path) == promised % 2**32:
        return promised
    return check_gzip(path, hash(file_state(path)))  # several streams follow each other, each with its end


@lru_cache(maxsize=2**14)
def check_gzip(path: Path, state: int) -> int:
    """Check the checksum of a compressed file, once for each version of it (``state``).

    A reader stops at the last voxel, before the checksum.

    Returns:
        The bytes before compression.
    """
    length = 0
    try:
        with gzip.open(path, "rb") as file:
            while block := file.read(_BLOCK):
                length += len(block)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"damaged: {error}") from error
    return length
