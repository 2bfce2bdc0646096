"""Manifold MixUp: training on weighted means of two images' features."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, SiteContext, SitePart, Targets
from medfedaug.models import insert_layers, stage_layers
from medfedaug.models.stages import StageLayer
from medfedaug.research.methods.mixup import draw_lambda, mixed_targets


class ManifoldMixUp(Method):
    """MixUp of hidden features (Verma et al., ICML 2019, Algorithm 1).

    Every step draws one place among the images and the encoder's stages. There x becomes
    λx_A + (1 − λ)x_B, and the loss λℓ(y_A) + (1 − λ)ℓ(y_B), with λ ~ Beta(α, α).

    Args:
        alpha: α; with 0 it is FedAvg.
        stages: the stages for the draw, all by default.

    Deviations:
        The paper draws among the input and the first two stages of ResNets, which is ``stages=[1, 2]``. Skip
        connections of a U-Net stay unmixed.
    """

    name = "manifold_mixup"
    requires = frozenset({"labels", "several_images"})
    excludes = frozenset({"labels"})

    def __init__(self, alpha: NotNegative = 2.0, stages: Sequence[int | str] | None = None) -> None:
        self.alpha, self.stages = alpha, stages

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return insert_layers(network, FeatureMixLayer, self.stages)

    def at_site(self, context: SiteContext) -> SitePart:
        return _ManifoldMixUpSite(self.alpha, list(stage_layers(context.network, FeatureMixLayer).values()))


class FeatureMixLayer(StageLayer):
    """The weighted mean of the features of two images, ``λ x_A + (1 − λ) x_B``.

    Attributes:
        partners: the position of each image's partner in the batch, (B,); ``None`` while not active.
        weight: λ, set together with the partners.
    """

    kind = "Manifold MixUp"
    slug = "manifold_mixup"
    partners: Tensor | None = None
    weight = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.partners is None:
            return x
        return torch.lerp(x[self.partners.to(x.device, non_blocking=True)], x, self.weight)


class _ManifoldMixUpSite(SitePart):
    def __init__(self, alpha: float, layers: Sequence[FeatureMixLayer]) -> None:
        self.alpha, self.layers = alpha, layers

    def mix(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        weight, order = draw_lambda(self.alpha), torch.randperm(len(inputs))
        place = int(torch.randint(len(self.layers) + 1, ()))
        for layer in self.layers:
            layer.partners = None
        if weight == 1:
            return inputs, targets
        if place == len(self.layers):
            inputs = torch.lerp(inputs[order.to(inputs.device)], inputs, weight)
        else:
            self.layers[place].partners, self.layers[place].weight = order, weight
        return inputs, mixed_targets(targets, weight, order)
