"""Volumes and photographs from files of any known format, and their properties without decoding them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from medfedaug.data.io.base import Header
from medfedaug.data.io.formats import format_of
from medfedaug.data.io.itk import SimpleITKReader
from medfedaug.data.io.voxel_files import file_states

__all__ = ["Header", "SimpleITKReader", "load_label", "load_volume", "read_header"]


def load_volume(path: Path) -> torch.Tensor:
    """A volume as it is stored, float32 of shape (C, X, Y, Z), with its affine; a photograph without, Z = 1.

    Raises:
        Exception: whatever the reader raises, `ValueError` for what is not a volume;
            `medfedaug.data.base.unreadable` makes one line of it.
    """
    return format_of(path).read_volume(path)


def load_label(path: Path) -> torch.Tensor:
    """A label map, float32: (1, X, Y, Z), or (C, X, Y, Z) of a volume that has channels.

    Raises:
        Exception: as `load_volume`, and for a label image in colour.
    """
    return format_of(path).read_label(path)


def read_header(path: Path) -> Header:
    """Read a volume's properties without decoding it.

    What was asked for before is not opened again, unless one of its files was written anew.

    Raises:
        Exception: as `load_volume`.
    """
    return _read_header(path, hash(file_states([path])))


@lru_cache(maxsize=2**14)
def _read_header(path: Path, state: int) -> Header:
    return format_of(path).read_header(path)
