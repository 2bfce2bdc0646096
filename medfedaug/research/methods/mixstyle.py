"""MixStyle: features with a mixture of two images' statistics."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medfedaug.functional import feature_statistics, working_precision
from medfedaug.functional.features import per_channel
from medfedaug.methods.arguments import NotNegative, Share
from medfedaug.methods.base import Method
from medfedaug.models import insert_layers
from medfedaug.models.stages import StageLayer


class MixStyle(Method):
    """A `MixStyleLayer` after early stages (Zhou et al., ICLR 2021).

    Styles are mixed within a batch, and so within a site. Nothing is exchanged.

    Args:
        prob: probability that a layer is active in a step; with 0 it is FedAvg.
        alpha: α of Beta(α, α).
        stages: the stages with a layer.

    Deviations:
        The paper puts the layers after the first two or three residual blocks of ResNets, here they come
        after the first two stages of any network.
    """

    name = "mixstyle"
    requires = frozenset({"several_images"})

    def __init__(
        self, prob: Share = 0.5, alpha: NotNegative = 0.1, stages: Sequence[int | str] | None = (1, 2)
    ) -> None:
        self.prob, self.alpha, self.stages = prob, alpha, stages

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return insert_layers(network, MixStyleLayer, self.stages, prob=self.prob, alpha=self.alpha)


class MixStyleLayer(StageLayer):
    """Mix the channel statistics of two images of the batch.

    ::

        x̂ = γ (x − μ(x))/σ(x) + β,   γ = λ σ(x) + (1 − λ) σ(x̃),
        β = λ μ(x) + (1 − λ) μ(x̃)

    with ``λ ~ Beta(α, α)`` for each image, and the partner x̃ from a permutation of the batch. No gradient
    flows through the statistics. In training the layer is active with probability `prob`, drawn once per call
    from torch's generator; in evaluation it returns its argument.

    Args:
        num_channels: number of channels C.
        prob: probability that the layer is active in a call.
        alpha: α; with 0, λ = 1, which changes nothing.
        eps: added to the spatial variance before its root.

    Deviations:
        Population variance; the paper's public code has the unbiased one.
    """

    kind = "MixStyle"
    slug = "mixstyle"

    def __init__(self, num_channels: int, prob: float = 0.5, alpha: float = 0.1, eps: float = 1e-6) -> None:
        super().__init__(num_channels)
        self.prob, self.alpha, self.eps = float(prob), float(alpha), float(eps)

    def forward(self, x: Tensor) -> Tensor:
        """Mix styles in training; features (B, C, *spatial)."""
        if not self.training or self.alpha == 0 or float(torch.rand(())) >= self.prob:
            return x
        work = working_precision(x)
        # Drawn on the CPU, without waiting for a GPU.
        share = torch.distributions.Beta(self.alpha, self.alpha).sample((len(x), 1))
        share = share.to(work, non_blocking=True)
        order = torch.randperm(len(x)).to(x.device, non_blocking=True)
        mean, std = (value.detach() for value in feature_statistics(work, self.eps))
        scale = torch.lerp(std[order], std, share) / std
        shift = torch.lerp(mean[order], mean, share) - mean * scale
        return (work * per_channel(scale, x.dim()) + per_channel(shift, x.dim())).to(x.dtype)
