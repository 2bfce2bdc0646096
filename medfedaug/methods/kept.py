"""Parts of methods whose server compares the models of a round."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from medfedaug.functional.weighted_mean import WeightedMean
from medfedaug.methods.base import Aggregator, Payload, ServerExchange, SiteUpdate


class AggregatorExchange(ServerExchange):
    """Exchange for an aggregator, which receives the payload with each update; nothing goes back."""

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Leave the payload to the aggregator."""

    def result(self) -> Payload:
        return {}


class KeptUpdates(Aggregator):
    """Aggregator that keeps the models of a round, in as much memory as all of them together.

    Every site counts as one: a bound on the number of hostile sites must not depend on the number of samples
    that a site claims.
    """

    def __init__(self) -> None:
        self._models: dict[str, Mapping[str, Tensor]] = {}

    def weigh(self, update: SiteUpdate) -> float:
        return 1.0

    def accept(self, update: SiteUpdate) -> None:
        self._models[update.site] = update.weights

    def take(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the models of the round by site, in the order of the names, and forget them."""
        models, self._models = self._models, {}
        return dict(sorted(models.items()))


def weighted_mean(
    models: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return the mean of models with these weights, float32."""
    mean = WeightedMean()
    for site, model in models.items():
        mean.add(model, weights[site])
    return mean.result()


def stacked(models: Mapping[str, Mapping[str, Tensor]], key: str) -> Tensor:
    """Stack one entry of all sites, (M, ...), float64."""
    return torch.stack([model[key].double() for model in models.values()])


def update_norms(
    models: Mapping[str, Mapping[str, Tensor]], start: Mapping[str, Tensor], keys: Collection[str]
) -> dict[str, float]:
    """Return ‖wₖ − w‖ of each site k, over all these entries together."""
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
    """Return one entry of w + Σₖ fₖ (wₖ − w), float64."""
    before = start[key].double()
    updated: Tensor = before + torch.tensordot(before.new_tensor(factors), stacked(models, key) - before, 1)
    return updated
