"""Parts of methods whose server compares the models of a round."""

from collections.abc import Mapping

import torch
from torch import Tensor

from medfedaug.functional.means import WeightedMean
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
