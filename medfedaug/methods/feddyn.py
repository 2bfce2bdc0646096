"""FedDyn: local objectives whose minima agree with the federation's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medfedaug.methods.arguments import Positive
from medfedaug.methods.base import Aggregator, Method, SitePart, shared_parameters
from medfedaug.methods.contexts import Payload, RoundMean, ServerContext, SiteContext, Step, shapes_of, zeros


class FedDyn(Method):
    """Dynamic regularisation (Acar et al., ICLR 2021, Algorithm 1).

    A site minimises L_k(θ) − ⟨g_k, θ⟩ + (α/2)‖θ − θᵗ⁻¹‖² and then sets g_k ← g_k − α(θ_k − θᵗ⁻¹). The server
    keeps h ← h − α Σ_k p_k(θ_k − θᵗ⁻¹), the sum over the sites of the round, and sends θᵗ = θ̄ − h/α with the
    mean θ̄ of their models; p_k is a site's share among all that train.

    Args:
        alpha: α.

    Raises:
        ConfigError: for an ``alpha`` that is not positive, or when no parameter is averaged.

    Deviations:
        p_k is 1/m in the paper, with equal weights; here it is the site's weight in the average. h is
        float64. Running statistics of norm layers become their mean.
    """

    name = "feddyn"
    requires = frozenset({"averaged_parameters", "global_start", "same_start"})

    def __init__(self, alpha: Positive = 0.01) -> None:
        self.alpha = alpha

    def at_site(self, context: SiteContext) -> SitePart:
        return _FedDynSite(self.alpha, context)

    def aggregator(self, context: ServerContext) -> Aggregator:
        return FedDynServer(self.alpha, context)


class _FedDynSite(SitePart):
    def __init__(self, alpha: float, context: SiteContext) -> None:
        self.alpha, self.parameters = alpha, shared_parameters(context, FedDyn.name)
        self.gradient: Payload = {k: torch.zeros_like(p).detach() for k, p in self.parameters.items()}
        self.anchor: Payload = {}

    def start_round(self) -> None:
        self.anchor = {key: p.detach().clone() for key, p in self.parameters.items()}

    def loss(self, step: Step) -> Tensor | None:
        terms = [
            self.alpha / 2 * ((p - self.anchor[key]) ** 2).sum() - (self.gradient[key] * p).sum()
            for key, p in self.parameters.items()
        ]
        return torch.stack(terms).sum()

    @torch.no_grad()
    def end_round(self) -> None:
        self.gradient = {
            key: self.gradient[key] - self.alpha * (p - self.anchor[key])
            for key, p in self.parameters.items()
        }

    def state(self) -> Payload:
        return self.gradient

    def restore(self, state: Payload) -> None:
        self.gradient = {key: value.to(self.parameters[key], copy=True) for key, value in state.items()}


class FedDynServer(Aggregator):
    """The server's half, which keeps h."""

    def __init__(self, alpha: float, context: ServerContext) -> None:
        self.alpha, self.weights = alpha, context.weights
        self.correction = zeros(shapes_of(shared_parameters(context, FedDyn.name)))

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Return θ̄ − h/α."""
        previous, mean = round_.previous, round_.mean
        share = sum(round_.weights.values()) / sum(self.weights().values())
        updated = dict(mean)
        for key, h in self.correction.items():
            h.sub_(mean[key].double() - previous[key].double(), alpha=self.alpha * share)
            updated[key] = (mean[key].double() - h / self.alpha).to(mean[key].dtype)
        return updated

    def summary(self) -> dict[str, Any]:
        return {"correction": float(torch.stack([h.norm() for h in self.correction.values()]).norm())}

    def state(self) -> Payload:
        return self.correction

    def restore(self, state: Payload) -> None:
        self.correction = {key: value.clone() for key, value in state.items()}
