"""MixStyle: features with a mixture of two images' statistics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from medfedaug.methods.arguments import NotNegative, Share
from medfedaug.methods.base import Method, SiteContext, SitePart
from medfedaug.methods.diversification import DiversifiedSite, Weights
from medfedaug.models import MixStyleLayer, insert_layers, stage_layers


class MixStyle(Method):
    """A `medfedaug.models.MixStyleLayer` after early stages (Zhou et al., ICLR 2021).

    Styles are mixed within a batch, and so within a site. Nothing is exchanged.

    Args:
        prob: probability that a layer is active in a step; with 0 it is FedAvg.
        alpha: α of Beta(α, α).
        stages: the stages with a layer.
        lambda1: with ``lambda2``, λ₁ and λ₂ of FedFD's loss (`medfedaug.methods.FedFD`, Eq. 5), for a batch
            that passes once without and once with mixed styles (FedFD-A Table 3, b). With both 0 the only
            pass mixes styles.
        lambda2: see ``lambda1``.

    Deviations:
        The paper puts the layers after the first two or three residual blocks of ResNets, here they come
        after the first two stages of any network.
    """

    name = "mixstyle"
    requires = frozenset({"several_images"})

    def __init__(
        self,
        prob: float = 0.5,
        alpha: float = 0.1,
        stages: Sequence[int | str] | None = (1, 2),
        lambda1: Share = 0.0,
        lambda2: NotNegative = 0.0,
    ) -> None:
        self.prob, self.alpha, self.stages = prob, alpha, stages
        self.weights = Weights(lambda1, lambda2)
        self.in_loss = bool(lambda1 or lambda2)
        if self.in_loss:
            self.requires, self.provides = self.requires | {"labels"}, frozenset({"extra_passes"})

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return insert_layers(network, MixStyleLayer, self.stages, prob=self.prob, alpha=self.alpha)

    def at_site(self, context: SiteContext) -> SitePart:
        return MixStyleSite(context.network, self.weights) if self.in_loss else SitePart()


class MixStyleSite(DiversifiedSite):
    """The site's half with mixed styles only in a second pass."""

    def __init__(self, network: nn.Module, weights: Weights) -> None:
        super().__init__(network, weights)
        self.ready = True
        self.layers = [*stage_layers(network, MixStyleLayer).values()]
        self.probs = [layer.prob for layer in self.layers]
        self._set([0.0] * len(self.layers))

    @contextmanager
    def diversified(self) -> Iterator[None]:
        self._set(self.probs)
        try:
            yield
        finally:
            self._set([0.0] * len(self.layers))

    def _set(self, probs: Sequence[float]) -> None:
        for layer, prob in zip(self.layers, probs, strict=True):
            layer.prob = prob
