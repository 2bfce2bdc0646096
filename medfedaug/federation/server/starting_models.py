"""The global models from which trainings that are under way began."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class StartingModels:
    """Keeps the model of each round whose request a site has not answered, for buffered rounds.

    Attributes:
        rounds: the round of the request that each such site has.
    """

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}
        self._models: dict[int, Mapping[str, Tensor]] = {}

    def asked(self, sites: Iterable[str], round_: int, model: Mapping[str, Tensor]) -> None:
        """Note that sites train from a model."""
        self.rounds.update(dict.fromkeys(sites, round_))
        needed = {*self.rounds.values()}
        self._models = {r: kept for r, kept in {**self._models, round_: model}.items() if r in needed}

    def answered(self, site: str) -> None:
        """Note that a site trains no longer, since its answer is here, or never comes."""
        self.rounds.pop(site, None)

    def of(self, site: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Return the round of a site's request and its model; ``None`` for a site that was not asked."""
        round_ = self.rounds.get(site)
        return None if round_ is None else (round_, self._models[round_])

    def move(self, device: torch.device) -> None:
        """Keep the models on a device."""
        for round_, model in self._models.items():
            self._models[round_] = {key: value.to(device) for key, value in model.items()}

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint; empty where nothing is under way."""
        models = {round_: dict(model) for round_, model in self._models.items()}
        return {"starts": {"rounds": self.rounds, "models": models}} if self.rounds else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        found = saved.get("starts", {"rounds": {}, "models": {}})
        self.rounds, self._models = dict(found["rounds"]), dict(found["models"])
