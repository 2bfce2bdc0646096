"""Files of tensors: read without running any code in them, and not read where a bit of them has changed."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["load_tensors"]


def load_tensors(path: Path) -> Any:
    """Load a file of `torch.save` on the CPU.

    PyTorch does not compare a file's content with the checksums that it has for each of its parts: a flipped
    bit of a weight would be another weight.

    Raises:
        OSError: when the file cannot be read.
        ValueError: when a part differs from its checksum.
        Exception: a damaged file fails anywhere between zip and pickle.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"damaged: {damaged} differs from its checksum")
    return torch.load(path, map_location="cpu", weights_only=True)
