"""MixUp: training on weighted means of two images."""

from __future__ import annotations

import torch
from torch import Tensor

from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, SiteContext, SitePart, Targets


def draw_lambda(alpha: float) -> float:
    """λ ~ Beta(α, α) from torch's generator; 1, which mixes nothing, where α is zero."""
    return float(torch.distributions.Beta(alpha, alpha).sample()) if alpha > 0 else 1.0


def mixed_targets(targets: Targets, weight: float, order: Tensor) -> Targets:
    """The targets of images that are mixed with a share 1 − ``weight`` of those in another order."""
    if weight == 1:
        return targets
    others = [((1 - weight) * w, labels[order.to(labels.device)]) for w, labels in targets]
    return [*((weight * w, labels) for w, labels in targets), *others]


class MixUp(Method):
    """Train on λxᵢ + (1 − λ)xⱼ with the loss λℓ(yᵢ) + (1 − λ)ℓ(yⱼ) (Zhang et al., ICLR 2018).

    λ ~ Beta(α, α) and the partner j, a permutation of the batch, are drawn anew in every step. In a
    federation an image mixes with others of its own site only. With α → 0 it is FedAvg.

    Args:
        alpha: α.

    Raises:
        ConfigError: for a negative ``alpha``.

    Deviations:
        The paper mixes one-hot labels, which for cross-entropy is the same; the weighted loss is also defined
        for label maps and Dice. One λ per batch, as in the paper's listing; `monai.transforms.MixUp` draws
        one for each image, whose losses then have to be weighted one by one.
    """

    name = "mixup"
    requires = frozenset({"labels", "several_images"})
    excludes = frozenset({"labels"})

    def __init__(self, alpha: NotNegative = 0.2) -> None:
        self.alpha = alpha

    def at_site(self, context: SiteContext) -> SitePart:
        return _MixUpSite(self.alpha)


class _MixUpSite(SitePart):
    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def mix(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        weight = draw_lambda(self.alpha)
        order = torch.randperm(len(inputs))
        if weight == 1:
            return inputs, targets
        return torch.lerp(inputs[order.to(inputs.device)], inputs, weight), mixed_targets(
            targets, weight, order
        )
