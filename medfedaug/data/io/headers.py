"""Properties of volumes and photographs without decoding them, whatever their format."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from medfedaug.data.io.base import Header
from medfedaug.data.io.formats import format_of
from medfedaug.data.io.voxel_files import file_states

__all__ = ["Header", "read_header"]


def read_header(path: Path) -> Header:
    """Read a volume's properties without decoding it.

    What was asked for before is not opened again, unless one of its files was written anew.

    Raises:
        Exception: whatever the reader raises, `ValueError` for what is not a volume.
    """
    return _read_header(path, hash(file_states([path])))


@lru_cache(maxsize=2**14)
def _read_header(path: Path, state: int) -> Header:
    return format_of(path).read_header(path)
