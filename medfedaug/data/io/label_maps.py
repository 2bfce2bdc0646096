"""Write label maps and probabilities as files, on the grid and in the format of their image."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medfedaug.data.io.base import Segments
from medfedaug.data.io.formats import format_of
from medfedaug.errors import StorageError

if TYPE_CHECKING:
    from torch import Tensor


def label_bits(classes: int) -> int:
    """Return the bits of a label: 8, or 16 for more than 256 classes."""
    return 8 if classes <= 2**8 else 16


def write_label_map(target: Path, image: Path, label: Tensor, segments: Segments) -> None:
    """Write a label map with the geometry of its image; the file is complete or absent.

    NIfTI gets the bytes of the geometry in the image's header (sform, qform, their codes, units); MHA and
    NRRD the image's origin, spacing and direction. A photograph gets a grey image, a DICOM series a DICOM SEG
    that refers to its slices, a format without a writer a NIfTI file. Labels have `label_bits`.
    """
    voxels = label[0].numpy().astype(f"uint{label_bits(len(segments.classes))}")
    write_whole(target, lambda path: format_of(image).write_label_map(path, image, voxels, segments))


def write_probabilities(target: Path, image: Path, shares: Tensor, segments: Segments) -> None:
    """Write the probabilities of the classes, (K, X, Y, Z), float32, in the format of the image.

    NIfTI, MHA and NRRD hold all classes, background first, in float32. A photograph has a file for each
    class, ``NAME_0.png``, ..., in which 65535 is 1. A DICOM SEG holds the classes without the background, in
    steps of 1/255.
    """
    voxels = np.moveaxis(shares.numpy(), 0, -1)
    write_whole(target, lambda path: format_of(image).write_probabilities(path, image, voxels, segments))


def write_whole(target: Path, save: Callable[[Path], Any]) -> None:
    """Let ``save`` write a file, or several in its folder, and move them when complete."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as name:
            folder = Path(name)
            save(folder / target.name)
            for path in folder.iterdir():
                os.replace(path, target.parent / path.name)
    except OSError as error:
        raise StorageError(target, error) from error
