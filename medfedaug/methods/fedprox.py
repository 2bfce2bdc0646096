"""FedProx: a proximal term keeps the local weights close to the global ones."""

import torch
from torch import Tensor, nn

from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, SiteContext, SitePart, Step, shared_parameters


class FedProx(Method):
    """Add (μ/2)·‖w − w_global‖² to the local loss (Li et al., MLSys 2020, Eq. 2).

    Args:
        mu: the coefficient μ.

    Deviations:
        None. The norm is squared, over all averaged trainable parameters, and every step has the term.
        (Public code bases omit the square, or apply the term once per round.)
    """

    name = "fedprox"
    requires = frozenset({"averaged_parameters"})

    def __init__(self, mu: NotNegative = 0.001) -> None:
        self.mu = mu

    def at_site(self, context: SiteContext) -> SitePart:
        return _FedProxSite(self.mu, shared_parameters(context, self.name))


class _FedProxSite(SitePart):
    def __init__(self, mu: float, parameters: dict[str, nn.Parameter]) -> None:
        self.mu, self.parameters, self.pull = mu, list(parameters.values()), mu
        self.anchor: list[Tensor] = []

    def start_round(self) -> None:
        self.anchor = [p.detach().clone() for p in self.parameters]

    def loss(self, step: Step) -> Tensor | None:
        pairs = zip(self.parameters, self.anchor, strict=True)
        return self.mu / 2 * torch.stack([((p - a) ** 2).sum() for p, a in pairs]).sum()
