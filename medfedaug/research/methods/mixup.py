"""MixUp: training on weighted means of two images."""

import torch
from torch import Tensor

from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, SiteContext, SitePart, Targets


def draw_lambda(alpha: float) -> float:
    """Draw λ ~ Beta(α, α) from torch's generator; 1, which mixes nothing, for α = 0."""
    return float(torch.distributions.Beta(alpha, alpha).sample()) if alpha > 0 else 1.0


def mixed_targets(targets: Targets, weight: float, order: Tensor) -> Targets:
    """Return the targets of images mixed with a share 1 − ``weight`` of images in another order."""
    if weight == 1:
        return targets
    others = [((1 - weight) * w, labels[order.to(labels.device)]) for w, labels in targets]
    return [*((weight * w, labels) for w, labels in targets), *others]


class MixUp(Method):
    """Train on λxᵢ + (1 − λ)xⱼ with the loss λℓ(yᵢ) + (1 − λ)ℓ(yⱼ) (Zhang et al., ICLR 2018).

    Every step draws λ ~ Beta(α, α) and the partners j, a permutation of the batch. In a federation an image
    mixes with images of the same site only. With α → 0 it is FedAvg.

    Args:
        alpha: α.

    Deviations:
        The paper mixes one-hot labels, which is equal for cross-entropy; the weighted loss is also defined
        for label maps and Dice. There is one λ per batch, as in the paper's listing; `monai.transforms.MixUp`
        draws one for each image, so that their losses need separate weights.
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
        weight, order = draw_lambda(self.alpha), torch.randperm(len(inputs))
        if weight == 1:
            return inputs, targets
        mixed = torch.lerp(inputs[order.to(inputs.device)], inputs, weight)
        return mixed, mixed_targets(targets, weight, order)
