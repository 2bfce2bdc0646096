"""Exchanges that many methods need: each site sends tensors, and receives their average."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from medfedaug.functional.weighted_mean import WeightedMean
from medfedaug.methods.base import ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, Shapes, shapes_of
from medfedaug.privacy.kinds import VARIANCE, WEIGHTS


class AverageServer(ServerExchange):
    """The server's half: the average of the sites' tensors, weighted as the average of the models is.

    Methods that find their weights at the end of a round alone, as FedCE, FedDG-GA and FedAWA, do not change
    those of this average.

    Args:
        tensors: such as a site sends, of which the shapes count. An entry ``running_var`` is a variance.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = shapes_of(tensors)
        self.variances = sorted(key for key in tensors if key.rpartition(".")[2] == "running_var")
        self.kinds = {key: VARIANCE if key in self.variances else WEIGHTS for key in tensors}
        self.mean = WeightedMean()

    weighted = True

    def terms(self, payload: Payload) -> Payload:
        """The payload itself."""
        return payload

    def accept_mean(self, means: Payload, sites: int) -> None:
        """The result."""
        self.mean.add(means, 1.0)

    def check(self, payload: Payload) -> None:
        """Refuse a negative variance."""
        for key in self.variances:
            if bool((payload[key] < 0).any()):
                raise ValueError(f"{key} is negative, and a variance cannot be")

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Add the tensors of one site."""
        self.mean.add(payload, weight)

    def result(self) -> Payload:
        mean, self.mean = self.mean.result(), WeightedMean()
        return mean


class AveragedParameters(SitePart, SiteExchange):
    """The site's half of an `AverageServer` of parameters that are no entries of the network's state dict.

    Args:
        parameters: by key; the run's optimiser trains them with the network.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.every_round = self
        self.parameters = dict(parameters)

    def collect(self) -> Payload:
        """The parameters as they are."""
        return {key: value.detach() for key, value in self.parameters.items()}

    @torch.no_grad()
    def apply(self, payload: Payload) -> None:
        """Take the averages."""
        for key, parameter in self.parameters.items():
            parameter.copy_(payload[key])


class FinalMeanServer(ServerExchange):
    """The server's half: the mean over the sites, each alike, which does not change once it was sent.

    For an exchange before training that decides what images look like: sites that join later use what the
    others trained with.

    Args:
        shapes: of what a site sends.
        kinds: see `medfedaug.methods.base.ServerExchange`.

    Attributes:
        total: the sum over the sites so far; empty before the first.
        mean: what was sent; empty until then.
    """

    needed_at_inference = True

    def __init__(self, shapes: Shapes, kinds: Mapping[str, str]) -> None:
        self.shapes, self.kinds = shapes, kinds
        self.total: Payload = {}
        self.sites = 0
        self.mean: Payload = {}

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Add the tensors of one site, until the mean has been sent."""
        if self.mean:
            return
        self.total = {key: value.double() + self.total.get(key, 0.0) for key, value in payload.items()}
        self.sites += 1

    def result(self) -> Payload:
        if not self.mean:
            self.mean = {key: (value / self.sites).float() for key, value in self.total.items()}
        return self.mean

    def state(self) -> Payload:
        """The mean that was sent."""
        return self.mean

    def restore(self, state: Payload) -> None:
        self.mean = dict(state)
