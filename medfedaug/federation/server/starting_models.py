"""Global models from which unfinished trainings began."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class StartingModels:
    """Keeps the model of each unanswered training request, for buffered rounds.

    Attributes:
        rounds: the round of each site's unanswered request.
    """

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}
        self._models: dict[int, Mapping[str, Tensor]] = {}

    def add(self, sites: Iterable[str], round_: int, model: Mapping[str, Tensor]) -> None:
        """Keep the model from which sites train, and drop models that no site needs."""
        self.rounds.update(dict.fromkeys(sites, round_))
        needed = {*self.rounds.values()}
        self._models = {r: kept for r, kept in {**self._models, round_: model}.items() if r in needed}

    def answered(self, site: str) -> None:
        """Note that a site has answered, or never will."""
        self.rounds.pop(site, None)

    def of(self, site: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Return the round and the model of a site's request; ``None`` without a request."""
        round_ = self.rounds.get(site)
        return None if round_ is None else (round_, self._models[round_])

    def move(self, device: torch.device) -> None:
        """Keep the models on a device."""
        for round_, model in self._models.items():
            self._models[round_] = {key: value.to(device) for key, value in model.items()}

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint; empty without an unanswered request."""
        models = {round_: dict(model) for round_, model in self._models.items()}
        return {"starts": {"rounds": self.rounds, "models": models}} if self.rounds else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        starts = saved.get("starts", {"rounds": {}, "models": {}})
        self.rounds, self._models = dict(starts["rounds"]), dict(starts["models"])
