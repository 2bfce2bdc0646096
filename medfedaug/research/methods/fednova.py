"""FedNova: updates normalised by the number of local steps of each site."""

from typing import Any

import torch
from torch import Tensor

from medfedaug.config.kinds import STEPS
from medfedaug.methods.base import (
    Aggregator,
    Method,
    ServerExchange,
    SiteExchange,
    SitePart,
    shared_parameters,
)
from medfedaug.methods.contexts import Payload, RoundMean, ServerContext, SiteContext, SiteUpdate, Step
from medfedaug.methods.exchanges import AggregatorExchange

_MOST_STEPS = 1e7


class FedNova(Method):
    """Normalised averaging (Wang et al., NeurIPS 2020, Eq. 5-8).

        x ← x − τ_eff Σᵢ pᵢ (x − yᵢ)/aᵢ,    τ_eff = Σᵢ pᵢ aᵢ,

    with the local models yᵢ, the sites' shares pᵢ, and aᵢ = ‖𝐚ᵢ‖₁: the number τ of local steps for plain
    SGD, (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ) with momentum ρ. With equal numbers of steps it is FedAvg.

    Exchange, every round: aᵢ up.

    Deviations:
        The paper has no aᵢ for Adam: here it is the number of steps, each about as long as the learning rate.
        The sites' weights in the mean are divided by aᵢ, also for running statistics of norm layers, which
        become that mean.
    """

    name = "fednova"
    requires = frozenset({"averaged_parameters"})
    excludes = frozenset({"given_shares"})

    def at_site(self, context: SiteContext) -> SitePart:
        return FedNovaSite(context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return LocalLengths()

    def aggregator(self, context: ServerContext) -> Aggregator:
        return FedNovaAggregator(context)


class FedNovaSite(SitePart, SiteExchange):
    def __init__(self, context: SiteContext) -> None:
        self.every_round, self.census = self, context.census
        self.momentum, self.steps = context.momentum, 0

    def start_round(self) -> None:
        self.steps = 0

    def before_step(self, step: Step) -> None:
        self.steps += 1

    def collect(self) -> Payload:
        rho, steps = self.momentum, self.steps
        length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return {"length": self.census.of_all(torch.tensor([length]))}

    def apply(self, payload: Payload) -> None:
        """Ignore the empty payload."""


class LocalLengths(AggregatorExchange):
    """Effective number of each site's steps, aᵢ."""

    shapes = {"length": (1,)}  # noqa: RUF012
    kinds = {"length": STEPS}  # noqa: RUF012

    def check(self, payload: Payload) -> None:
        """Refuse an impossible number of steps, by which a weight is divided."""
        if not 1 <= float(payload["length"]) <= _MOST_STEPS:
            raise ValueError(f"expected a number of steps, got {float(payload['length'])}")


class FedNovaAggregator(Aggregator):
    """The server's half: the step of Eq. 5, from the mean with weights pᵢ/aᵢ."""

    def __init__(self, context: ServerContext) -> None:
        self.keys = list(shared_parameters(context, FedNova.name))
        self.lengths: dict[str, float] = {}
        self.effective = 0.0

    def weigh(self, update: SiteUpdate) -> float:
        """Return pᵢ/aᵢ, not divided by Σ pᵢ."""
        return update.weight / float(update.payload["length"])

    def accept(self, update: SiteUpdate) -> None:
        self.lengths[update.site] = float(update.payload["length"])

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Return x + τ_eff Σᵢ pᵢ/aᵢ (ȳ − x), with the mean ȳ for weights pᵢ/aᵢ."""
        # A fixed order, so that the sums do not depend on the order of arrival.
        lengths, self.lengths = dict(sorted(self.lengths.items())), {}
        samples = {site: round_.weights[site] * length for site, length in lengths.items()}
        total = sum(samples.values())
        self.effective = sum(n / total * lengths[site] for site, n in samples.items())
        scale = self.effective * sum(round_.weights[site] for site in lengths) / total
        updated = dict(round_.mean)
        for key in self.keys:
            start, mean = round_.previous[key].double(), round_.mean[key].double()
            updated[key] = (start + scale * (mean - start)).to(round_.mean[key].dtype)
        return updated

    def summary(self) -> dict[str, Any]:
        return {"steps": self.effective}
