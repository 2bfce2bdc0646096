"""`Benchmark`: a published data set, as its file in ``datasets/`` registers it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from medfedaug.data.base import SiteFolder

COMMON_OPTIONS: dict[str, Any] = {
    "fraction": 1.0,
    "unseen": "",
    "deal": 1,
    "deal_alpha": 0.0,
    "deal_domains": 1,
}
"""The options of every benchmark (`medfedaug.data.benchmarks.open_benchmark`), with their defaults."""


@dataclass(frozen=True)
class Benchmark:
    """A published data set.

    Args:
        open: from the folder and options to the sites; raises `FileNotFoundError` for what is not there.
        description: in one line.
        source: where its owners publish it.
        layout: what the folder holds, in one line.
    """

    open: Callable[..., list[SiteFolder]]
    description: str
    source: str
    layout: str

    @property
    def options(self) -> dict[str, Any]:
        """The options of `open_benchmark` for this benchmark, with their defaults."""
        own = list(inspect.signature(self.open).parameters.values())[1:]
        return {**COMMON_OPTIONS, **{option.name: option.default for option in own}}
