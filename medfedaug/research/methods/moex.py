"""MOEX: features with the moments of another image of the batch."""

import torch
from torch import Tensor, nn

from medfedaug.functional import working_precision
from medfedaug.methods.arguments import Share
from medfedaug.methods.base import Method, SiteContext, SitePart, Targets
from medfedaug.models import insert_layers, stage_layers
from medfedaug.models.stages import StageLayer
from medfedaug.research.methods.mixup import mixed_targets


class MoEx(Method):
    """Moment exchange (Li et al., CVPR 2021).

    With probability p, the features of every image after an early stage get the moments of another image of
    the batch (`MomentExchangeLayer`), and the loss becomes λℓ(y_A) + (1 − λ)ℓ(y_B) (Eq. 3).

    Args:
        prob: p; with 0 it is FedAvg.
        weight: λ, the share of an image's own label.
        stage: the stage after which moments are exchanged.

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


class MomentExchangeLayer(StageLayer):
    """Give the features of an image the moments of its partner (Li et al., Eq. 1-2).

    ::

        x̂_A = σ_B (x_A − μ_A)/σ_A + μ_B

    with moments over the channels, at every position.

    Attributes:
        partners: the position of each image's partner in the batch, (B,), set by the method, which also
            mixes the labels; ``None`` while the layer is not active.

    Deviations:
        Population variance, as in the paper's equations; its public code has the unbiased one.
    """

    kind = "MOEX"
    slug = "moex"
    eps = 1e-5
    """Added to the variance before its root."""
    partners: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.partners is None:
            return x
        work, partner = working_precision(x), x[self.partners.to(x.device, non_blocking=True)]
        mean, std = self._moments(work)
        other_mean, other_std = self._moments(working_precision(partner))
        return ((work - mean) / std * other_std + other_mean).to(x.dtype)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
        return mean, (variance + self.eps).sqrt()


class _MoExSite(SitePart):
    def __init__(self, method: MoEx, layer: MomentExchangeLayer) -> None:
        self.method, self.layer = method, layer

    def mix(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        self.layer.partners = None
        if float(torch.rand(())) >= self.method.prob:
            return inputs, targets
        self.layer.partners = torch.randperm(len(inputs))
        return inputs, mixed_targets(targets, self.method.weight, self.layer.partners)
