"""`PlannedRun`: one run of a sweep, and its folder."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfedaug.config.run import RunConfig
from medfedaug.research.datasets.benchmarks import find_benchmark
from medfedaug.research.papers.axes import shown

BASE = "base"  # name of the preset without other settings


@dataclass(frozen=True)
class PlannedRun:
    """Run of a sweep.

    Args:
        settings: names and values, as text, of the settings that differ from the preset; sorted.
        data: the options of the data set.
        reduced: reductions of the preset (a share of the rounds, a limit of cases), in words.
        fold: number of the tested fold; 0 without folds.
    """

    methods: str
    settings: tuple[tuple[str, str], ...]
    config: RunConfig
    data: Mapping[str, Any]
    reduced: str = ""
    held_out: str = ""
    fold: int = 0
    folds: int = 0

    @property
    def variant(self) -> str:
        """Return the settings as one string; empty for the preset itself."""
        return ",".join(f"{name}={value}" for name, value in self.settings)

    @property
    def seed(self) -> int:
        """Return the run's seed."""
        return self.config.seed

    @property
    def folder(self) -> Path:
        """Return the run's folder inside the sweep's: ``<methods>/<variant>/seed-<k>``."""
        parts = [text for text in (self.variant, self.reduced) if text]
        parts += [f"without={self.held_out}"] if self.held_out else []
        parts += [f"fold={self.fold}of{self.folds}"] if self.fold else []
        variant = re.sub(r"[\s\"{}]", "", ",".join(parts)).replace("/", "-").replace(":", "-")
        return Path(self.methods) / (variant or BASE) / f"seed-{self.seed}"

    def data_folder(self, benchmark: str) -> Path:
        """Return the folder of the data's marker inside the sweep's, named after the options and the fold."""
        defaults = find_benchmark(benchmark).options
        options = {k: v for k, v in self.data.items() if v != defaults[k] and k not in ("fold", "fold_seed")}
        name = "_".join([benchmark, *(f"{key}-{shown(value)}" for key, value in options.items())])
        if self.fold:  # other seeds have other folds, under the same name
            return Path("data") / f"seed-{self.seed}" / f"{name}_fold-{self.fold}"
        return Path("data") / name
