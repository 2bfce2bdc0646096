"""MOEX: features with the moments of another image of the batch."""

import torch
from torch import Tensor, nn

from medfedaug.methods.arguments import Share
from medfedaug.methods.base import Method, SiteContext, SitePart, Targets
from medfedaug.models import MomentExchangeLayer, insert_layers, stage_layers
from medfedaug.research.methods.mixup import mixed_targets


class MoEx(Method):
    """Moment exchange (Li et al., CVPR 2021).

    With probability p, the features of every image after an early stage get the moments of another image of
    the batch (`medfedaug.models.MomentExchangeLayer`), and the loss becomes λℓ(y_A) + (1 − λ)ℓ(y_B) (Eq. 3).

    Args:
        prob: p; with 0 it is FedAvg.
        weight: λ, the share of an image's own label.
        stage: the stage after which moments are exchanged.

    Raises:
        ConfigError: for arguments out of range.

    Deviations:
        The paper exchanges after the first layer; here it is the first stage, after its pooling.
    """

    name = "moex"
    requires = frozenset({"labels", "several_images"})
    excludes = frozenset({"labels"})

    def __init__(self, prob: Share = 0.5, weight: Share = 0.9, stage: int | str = 1) -> None:
        self.prob, self.weight, self.stage = prob, weight, stage

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return insert_layers(network, MomentExchangeLayer, [self.stage])

    def at_site(self, context: SiteContext) -> SitePart:
        (layer,) = stage_layers(context.network, MomentExchangeLayer).values()
        return _MoExSite(self, layer)


class _MoExSite(SitePart):
    def __init__(self, method: MoEx, layer: MomentExchangeLayer) -> None:
        self.method, self.layer = method, layer

    def mix(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        self.layer.partners = None
        if float(torch.rand(())) >= self.method.prob:
            return inputs, targets
        self.layer.partners = torch.randperm(len(inputs))
        return inputs, mixed_targets(targets, self.method.weight, self.layer.partners)
