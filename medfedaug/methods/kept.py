"""Parts of methods whose server compares models: kept models, and values that sites send with them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from medfedaug.methods.base import Aggregator, Payload, ServerExchange, SiteUpdate


class AggregatorExchange(ServerExchange):
    """Exchange for an aggregator, which receives it with each update.

    Nothing is added up here, and nothing goes back as an exchange.
    """

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """The aggregator is given it too."""

    def result(self) -> Payload:
        return {}


class KeptUpdates(Aggregator):
    """Keeps the models of a round: as much memory as all of them together.

    Every site counts as one, since what a bound on the number of hostile sites is worth must not depend on
    how many samples a site claims.
    """

    counts_samples: ClassVar[bool] = False
    """Flag: the sites' usual weights count."""

    def __init__(self) -> None:
        self._models: dict[str, Mapping[str, Tensor]] = {}

    def weigh(self, update: SiteUpdate) -> float:
        """1, or the site's usual weight."""
        return update.weight if self.counts_samples else 1.0

    def accept(self, update: SiteUpdate) -> None:
        """Keep the model."""
        self._models[update.site] = update.weights

    def take(self) -> dict[str, Mapping[str, Tensor]]:
        """The models of the round by site, in the order of the names and not of arrival."""
        models, self._models = self._models, {}
        return dict(sorted(models.items()))


def stacked(models: Mapping[str, Mapping[str, Tensor]], key: str) -> Tensor:
    """Stack one entry of all sites, (M, ...), float64."""
    return torch.stack([model[key].double() for model in models.values()])


def update_norms(
    models: Mapping[str, Mapping[str, Tensor]], start: Mapping[str, Tensor], keys: Collection[str]
) -> dict[str, float]:
    """‖wₖ − w‖ of each site k, over all these entries together."""
    return {
        site: math.hypot(*(float((model[key].double() - start[key].double()).norm()) for key in keys))
        for site, model in models.items()
    }


def moved(
    models: Mapping[str, Mapping[str, Tensor]],
    start: Mapping[str, Tensor],
    key: str,
    factors: Sequence[float],
) -> Tensor:
    """Compute one entry of w + Σₖ fₖ (wₖ − w), float64."""
    before = start[key].double()
    found: Tensor = before + torch.tensordot(before.new_tensor(factors), stacked(models, key) - before, 1)
    return found
