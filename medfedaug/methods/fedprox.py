"""FedProx: a proximal term holds the local weights near the global ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medfedaug.errors import ConfigError
from medfedaug.methods.base import Method, SiteContext, SitePart, Step

__all__ = ["FedProx"]


class FedProx(Method):
    """Add (μ/2)·‖w − w_global‖² to the local loss (Li et al., MLSys 2020, Eq. 2).

    Args:
        mu: the coefficient μ.

    Raises:
        ConfigError: for a negative ``mu``.

    Deviations:
        None. The norm is squared, over all trainable parameters, and the term is there in every step.
    """

    name = "fedprox"

    def __init__(self, mu: float = 0.001) -> None:
        if mu < 0:
            raise ConfigError(f"fedprox: mu cannot be negative, got {mu}")
        self.mu = mu

    def at_site(self, context: SiteContext) -> SitePart:
        """The proximal term of one site."""
        return _FedProxSite(self.mu, context.network)


class _FedProxSite(SitePart):
    def __init__(self, mu: float, network: nn.Module) -> None:
        self.mu, self.network = mu, network
        self.anchor: list[Tensor] = []

    def start_round(self) -> None:
        self.anchor = [p.detach().clone() for p in self.network.parameters()]

    def loss(self, step: Step) -> Tensor | None:
        pairs = zip(self.network.parameters(), self.anchor, strict=True)
        return self.mu / 2 * torch.stack([((p - a) ** 2).sum() for p, a in pairs if p.requires_grad]).sum()
