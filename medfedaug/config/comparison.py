"""`ComparisonConfig`: settings of short trainings of several methods, which are compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar

from medfedaug.config.options import Settings, setting, settings
from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, MedFedAugError

REFERENCE, ALONE = "fedavg", "single"
"""The methods that every comparison has: plain averaging, and each site by itself."""
REMEDIES = ("fedrdn", "fedbn", "ditto", "fedfa")
"""A method for each cause of differences: intensities, norm layers, what sites cannot share, features."""
SEEDS = 2  # trainings of each method, by default
SCORED_AT = (0.5, 1.0)  # shares of the rounds after which the models are scored

_UNITS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Training:
    """One training of a comparison: a method, and one of its seeds, from 0."""

    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.method}/{self.seed}"

    @property
    def reference(self) -> Training:
        """The reference's training with the same seed."""
        return Training(REFERENCE, self.seed)


@settings
class ComparisonConfig(Settings):
    """Short trainings of several methods with equal settings, one after the other.

    Raises:
        ConfigError: without the methods `REFERENCE` and `ALONE`, or for a value out of range.
    """

    TITLE: ClassVar[str] = "comparison: "

    run: RunConfig = setting(
        RunConfig, "Settings of all trainings; ``rounds`` is the largest number.", flags=None
    )
    methods: dict[str, Any] = setting(
        dict, "The methods of each training (`RunConfig.methods`), by a name without a slash.", flags=None
    )
    seeds: int = setting(
        SEEDS, "Trainings of each method; the first has the run's seed.", at_least=2, at_most=20, flags=None
    )
    budget: float = setting(
        0.0, "Seconds for all trainings; 0 for no limit.", at_least=0, at_most=1e7, flags=None
    )

    def __post_init__(self) -> None:
        sound = all("/" not in name and isinstance(m, list | tuple) for name, m in self.methods.items())
        if not sound or not {REFERENCE, ALONE} <= self.methods.keys():
            raise ConfigError(
                f"{self.TITLE}methods must be lists of methods by a name without a slash, {REFERENCE} and "
                f"{ALONE} among them"
            )

    @property
    def order(self) -> list[str]:
        """The names of the methods, the reference first: the others are compared with it."""
        return [REFERENCE, *(name for name in self.methods if name != REFERENCE)]

    def trainings(self) -> Iterator[Training]:
        """Yield the trainings in the order in which they are made."""
        for method in self.order:
            for seed in range(self.seeds):
                yield Training(method, seed)

    def config(self, training: Training) -> RunConfig:
        """Return the settings of a training."""
        methods = tuple(self.methods[training.method])
        return replace(self.run, methods=methods, seed=self.run.seed + training.seed)

    def configs(self) -> Mapping[str, RunConfig]:
        """Return the settings of all trainings, by name."""
        return {str(training): self.config(training) for training in self.trainings()}

    def stages(self) -> list[int]:
        """Return the rounds after which the models are scored.

        Example:
            >>> methods = {"fedavg": [{"name": "fedavg"}], "single": [{"name": "single"}]}
            >>> ComparisonConfig(run=RunConfig(rounds=10), methods=methods).stages()
            [5, 10]
        """
        return sorted({ceil(share * self.run.rounds) for share in SCORED_AT})


def choose_methods(
    names: Sequence[str], configure: Callable[[str], RunConfig], *, needed: bool
) -> tuple[dict[str, RunConfig], dict[str, str]]:
    """Return the settings of each method, with those of `REFERENCE` and `ALONE`, and what is left out."""
    configs, left_out = {}, {}
    for name in dict.fromkeys([REFERENCE, ALONE, *names]):
        try:
            configs[name] = configure(name)
        except MedFedAugError as error:
            if needed or name in (REFERENCE, ALONE):
                raise
            left_out[name] = str(error)
    return configs, left_out


def parse_budget(text: str) -> float:
    """Return the seconds of a budget such as ``10min``, ``90s`` or ``1.5h``.

    Example:
        >>> parse_budget("10min"), parse_budget("1.5 h")
        (600.0, 5400.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"--budget {text}: write a time such as 10min, 90s or 1.5h")
    return float(match[1]) * _UNITS[match[2]]
