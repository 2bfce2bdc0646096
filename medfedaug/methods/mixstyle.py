"""MixStyle: features take on a mixture of two images' statistics."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from medfedaug.methods.base import Method
from medfedaug.models import MixStyleLayer, insert_layers

__all__ = ["MixStyle"]


class MixStyle(Method):
    """A `medfedaug.models.MixStyleLayer` after early stages (Zhou et al., ICLR 2021).

    Styles are mixed within a batch, and so within a site. Nothing is exchanged.

    Args:
        prob: probability that a layer is active in a step; with 0 it is FedAvg.
        alpha: α of Beta(α, α).
        stages: the stages that get a layer.

    Deviations:
        The paper puts the layers after the first two or three residual blocks of ResNets; which stages of
        other networks correspond is left to judgement: here the first two.
    """

    name = "mixstyle"
    requires = frozenset({"several_images"})

    def __init__(
        self, prob: float = 0.5, alpha: float = 0.1, stages: Sequence[int | str] | None = (1, 2)
    ) -> None:
        self.prob, self.alpha, self.stages = prob, alpha, stages

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return insert_layers(network, MixStyleLayer, self.stages, prob=self.prob, alpha=self.alpha)
