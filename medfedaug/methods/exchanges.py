"""Exchanges and aggregators that several methods share: averages, gathered tensors, kept models."""

from collections.abc import Mapping

import torch
from torch import Tensor

from medfedaug.config.kinds import VARIANCE, WEIGHTS
from medfedaug.functional.means import WeightedMean
from medfedaug.methods.base import Aggregator, ServerExchange, Shapes, SiteExchange, SitePart, SiteUpdate
from medfedaug.methods.contexts import Payload, shapes_of


class AverageServer(ServerExchange):
    """The server's half: the average of the sites' tensors, with the weights of the models.

    Methods that compute weights at the end of a round, such as FedDG-GA, do not change the weights of this
    average. ``tensors`` is an example of a site's tensors; an entry ``running_var`` is a variance.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = shapes_of(tensors)
        self.kinds = {key: VARIANCE if is_variance(key) else WEIGHTS for key in tensors}
        self.mean = WeightedMean()

    weighted = True

    def terms(self, payload: Payload) -> Payload:
        return payload

    def accept_mean(self, means: Payload, sites: int) -> None:
        self.mean.add(means, 1.0)

    def check(self, payload: Payload) -> None:
        check_variances(payload)

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        self.mean.add(payload, weight)

    def result(self) -> Payload:
        mean, self.mean = self.mean.result(), WeightedMean()
        return mean


class AveragedParameters(SitePart, SiteExchange):
    """The site's half of an `AverageServer` of parameters that are not entries of the network's state dict.

    The run's optimiser trains them with the network.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.every_round = self
        self.parameters = dict(parameters)

    def collect(self) -> Payload:
        return {key: value.detach() for key, value in self.parameters.items()}

    @torch.no_grad()
    def apply(self, payload: Payload) -> None:
        for key, parameter in self.parameters.items():
            parameter.copy_(payload[key])


def is_variance(key: str) -> bool:
    """Return whether an entry of a state dict is a running variance."""
    return key.rpartition(".")[2] == "running_var"


def check_variances(payload: Payload) -> None:
    """Refuse a negative running variance."""
    for key, value in payload.items():
        if is_variance(key) and bool((value < 0).any()):
            raise ValueError(f"{key} is negative, and a variance cannot be")


class GatheredServer(ServerExchange):
    """The server's half: every site receives ``<key>/<site>`` of all sites."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.sites: dict[str, Payload] = {}

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        self.sites[site] = payload

    def result(self) -> Payload:
        payloads = sorted(self.sites.items())
        return {f"{key}/{site}": value for site, payload in payloads for key, value in payload.items()}

    def state(self) -> Payload:
        return self.result()

    def restore(self, state: Payload) -> None:
        for path, value in state.items():
            key, site = path.split("/", 1)
            self.sites.setdefault(site, {})[key] = value


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


def stacked(models: Mapping[str, Mapping[str, Tensor]], key: str) -> Tensor:
    """Stack one entry of all sites, (M, ...), float64."""
    return torch.stack([model[key].double() for model in models.values()])
