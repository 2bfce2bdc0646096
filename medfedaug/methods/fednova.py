"""FedNova: updates normalised by how far each site has gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medfedaug.methods.base import (
    Method,
    Payload,
    ServerContext,
    ServerExchange,
    ServerPart,
    SiteContext,
    SiteExchange,
    SitePart,
    Step,
    shared_parameters,
)

__all__ = ["FedNova", "FedNovaServer", "FedNovaSite"]

_MOST_STEPS = 1e7


class FedNova(Method):
    """Normalised averaging (Wang et al., NeurIPS 2020, Eq. 5-8).

        x ← x − τ_eff Σᵢ pᵢ (x − yᵢ)/aᵢ,    τ_eff = Σᵢ pᵢ aᵢ,

    with the local models yᵢ, the sites' shares pᵢ, and aᵢ = ‖𝐚ᵢ‖₁: the number τ of local steps for plain
    SGD, (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ) with momentum ρ. Sites that go the same number of steps make it
    FedAvg.

    Exchange, every round: aᵢ up.

    Raises:
        ConfigError: where no parameter is averaged.

    Deviations:
        The paper has no aᵢ for Adam: the number of steps, since each is about as long as the learning rate.
        The sites' weights in the mean are divided by aᵢ, which also holds for running statistics of norm
        layers; these become that mean.
    """

    name = "fednova"

    def at_site(self, context: SiteContext) -> SitePart:
        """How far the site has gone."""
        return FedNovaSite(context)

    def at_server(self, context: ServerContext) -> ServerPart:
        """The normalised mean."""
        return FedNovaServer(context)


class FedNovaSite(SitePart, SiteExchange):
    """The site's half."""

    def __init__(self, context: SiteContext) -> None:
        self.every_round = self
        self.momentum, self.steps = context.momentum, 0

    def start_round(self) -> None:
        """Begin to count."""
        self.steps = 0

    def before_step(self, step: Step) -> None:
        """One step more."""
        self.steps += 1

    def collect(self) -> Payload:
        """aᵢ."""
        rho, steps = self.momentum, self.steps
        length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return {"length": torch.tensor([length])}

    def apply(self, payload: Payload) -> None:
        """Nothing comes back."""


class FedNovaServer(ServerPart, ServerExchange):
    """The server's half."""

    shapes = {"length": (1,)}  # noqa: RUF012

    def __init__(self, context: ServerContext) -> None:
        self.keys = list(shared_parameters(context, FedNova.name))
        self.lengths: dict[str, float] = {}
        self.effective = 0.0

    def check(self, payload: Payload) -> None:
        """A weight is divided by it."""
        if not 1 <= float(payload["length"]) <= _MOST_STEPS:
            raise ValueError(f"a number of steps, got {float(payload['length'])}")

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Remember a site's aᵢ."""
        self.lengths[site] = float(payload["length"])

    def weight(self, site: str, weight: float) -> float:
        """pᵢ/aᵢ."""
        return weight / self.lengths[site]

    def update(
        self, previous: Mapping[str, Tensor], mean: Mapping[str, Tensor], sites: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """The step of Eq. 5, from the mean with weights pᵢ/aᵢ."""
        full = {site: weight * self.lengths[site] for site, weight in sites.items()}
        total = sum(full.values())
        self.effective = sum(weight / total * self.lengths[site] for site, weight in full.items())
        further = self.effective * sum(sites.values()) / total - 1
        updated = dict(mean)
        for key in self.keys:
            end = mean[key].double()
            updated[key] = (end + further * (end - previous[key].double())).to(mean[key].dtype)
        self.lengths = {}
        return updated

    def result(self) -> Payload:
        """Nothing: the step is in the model."""
        return {}

    def summary(self) -> dict[str, Any]:
        """τ_eff."""
        return {"steps": self.effective}
