"""`Storage`: where a site keeps its prepared images, and how it loads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "DEFAULT_MEMORY", "MEMORY_VARIABLE", "Storage"]

MEMORY_VARIABLE = "MEDFEDAUG_MEMORY"
"""Environment variable with the GiB of memory for prepared images."""
CACHE_VARIABLE = "MEDFEDAUG_CACHE"
"""Environment variable with the folder for those that do not fit."""
DEFAULT_MEMORY = 2.0
"""GiB."""


@dataclass(frozen=True)
class Storage:
    """Settings for a site's prepared images: memory, folder and loading. No job carries them.

    Args:
        max_bytes: how much is kept in memory; the rest is in files.
        folder: where these files are kept, also for later jobs; ``None`` for a temporary folder that goes
            with the process.
        ahead: how many batches are made ahead, in a thread beside the training.
        graphs: ``"auto"`` or ``"on"``: steps of the training are captured as CUDA graphs where they can be;
            with ``"on"`` a warning says where they cannot. ``"off"``: they are not.
    """

    max_bytes: int = int(DEFAULT_MEMORY * 2**30)
    folder: Path | None = None
    ahead: int = 1
    graphs: str = "auto"
