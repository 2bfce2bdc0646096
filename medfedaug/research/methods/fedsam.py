"""FedSAM: local steps towards flat minima."""

from collections.abc import Callable

import torch

from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, SiteContext, SitePart, Step


class FedSAM(Method):
    """Local steps with sharpness-aware minimisation (Qu et al., ICML 2022; Caldarola et al., ECCV 2022).

    Each step descends along the gradient at the worst weights nearby (Foret et al., ICLR 2021):

        ε = ρ g(w)/‖g(w)‖,    w ← w − η g(w + ε),

    with both gradients from the same batch. With ρ = 0 it is FedAvg, bit for bit.

    Args:
        rho: ρ, the radius of the neighbourhood.

    Deviations:
        The two passes share their random numbers (dropout, FFA layers), so that they have the same loss, and
        only the first updates running statistics. The run's optimiser steps along the second gradient, SGD in
        the papers. MoFedSAM, the variant with momentum, is another method.
    """

    name = "fedsam"

    def __init__(self, rho: NotNegative = 0.05) -> None:
        self.rho = rho

    def at_site(self, context: SiteContext) -> SitePart:
        return _FedSAMSite(self.rho)


class _FedSAMSite(SitePart):
    def __init__(self, rho: float) -> None:
        self.rho = rho

    def gradients(self, step: Step, again: Callable[[], None]) -> None:
        gradients_nearby(step, again, self.rho)


def gradients_nearby(step: Step, again: Callable[[], None], radius: float) -> None:
    """Replace the gradients at w by those at w + ε, with ε of length ``radius`` along the former."""
    moved = [(p, p.detach().clone(), p.grad) for p in step.network.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for _, _, gradient in moved]).norm()
    scale = radius / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    with torch.no_grad():
        for parameter, _, gradient in moved:
            parameter.add_(gradient * scale)
    again()
    with torch.no_grad():
        for parameter, before, _ in moved:
            parameter.copy_(before)
