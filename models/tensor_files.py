"""Read files of tensors: run no code in them, and refuse damaged files."""

import zipfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["load_tensors"]


def load_tensors(path: Path) -> Any:
    """Load a file of `torch.save` on the CPU.

    PyTorch does not verify the checksums of a file's parts: a flipped bit would change a weight.

    Raises:
        OSError: when the file cannot be read.
        ValueError: when a part differs from its checksum.
        Exception: of any kind, for a damaged file.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"damaged: {damaged} differs from its checksum")
    return torch.load(path, map_location="cpu", weights_only=True)
