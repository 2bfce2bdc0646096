"""`Storage`: where a site's machine keeps prepared images, and how it loads and computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medfedaug.utils.validation import check_choice

__all__ = [
    "CACHE_VARIABLE",
    "DEFAULT_MEMORY",
    "DETERMINISTIC_TEXT",
    "DETERMINISTIC_VARIABLE",
    "GRAPHS",
    "GRAPHS_TEXT",
    "GRAPHS_VARIABLE",
    "MEMORY_VARIABLE",
    "Storage",
]

MEMORY_VARIABLE = "MEDFEDAUG_MEMORY"
"""Environment variable with the GiB of memory for prepared images."""
CACHE_VARIABLE = "MEDFEDAUG_CACHE"
"""Environment variable with the folder for those that do not fit."""
GRAPHS_VARIABLE = "MEDFEDAUG_GRAPHS"
"""Environment variable with one of `GRAPHS`."""
DETERMINISTIC_VARIABLE = "MEDFEDAUG_DETERMINISTIC"
"""Environment variable, ``true`` for deterministic operations."""
DEFAULT_MEMORY = 2.0
"""GiB."""
GRAPHS = ("auto", "on", "off")
GRAPHS_TEXT = (
    "Training steps as CUDA graphs. auto: where the methods allow it. on: the same, and a warning also where "
    "there is no CUDA. off: never."
)
DETERMINISTIC_TEXT = (
    "Operations that give the same bits each time on one GPU; slower, and an error where PyTorch has none."
)


@dataclass(frozen=True)
class Storage:
    """Settings of a site's machine for prepared images and for computing. No job carries them.

    Args:
        max_bytes: how much is kept in memory; the rest is in files.
        folder: where these files are kept, also for later jobs; ``None`` for a temporary folder that goes
            with the process.
        ahead: how many batches are made ahead, in a thread beside the training.
        graphs: one of `GRAPHS`; see `GRAPHS_TEXT`.
        deterministic: see `DETERMINISTIC_TEXT`.

    Raises:
        ConfigError: for any other value of ``graphs``.
    """

    max_bytes: int = int(DEFAULT_MEMORY * 2**30)
    folder: Path | None = None
    ahead: int = 1
    graphs: str = "off"
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_choice("graphs", self.graphs, GRAPHS)
