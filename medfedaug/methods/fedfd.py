"""FedFD: features diversified by statistics between the image's own and the federation's."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from medfedaug.methods.arguments import NotNegative, Share
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext
from medfedaug.methods.exchanges import AverageServer, check_variances
from medfedaug.methods.site_parts import DiversifiedSite, Reduction
from medfedaug.models import adaptation

_STATISTICS = ("running_mean", "running_var")


class FedFD(Method):
    """Federated feature diversification.

    Yang et al., "Feature Diversification and Adaptation for Federated Domain Generalization", section 3.2. A
    batch passes through the network twice: as usual, f, and with batch norms that use statistics between each
    image's and the federation's, ``f_Δ`` (Eq. 2)::

        μ_Δ = u μᵢ + (1 − u) μ_G,   σ_Δ = u σᵢ + (1 − u) σ_G

    with u ~ U(0, 1) for each channel, new in every step. The loss becomes (Eq. 3-5) ::

        (1 − λ₁) CE(f) + λ₁ CE(f_Δ) + λ₂ ‖f − f_Δ‖²

    with the input of the network's head as features f, and the task's loss as CE. Inference is the plain
    network's.

    Exchange, every round and batch norm: the site's running mean and variance (C,) up, their average down,
    with the weights of the models. It is separate from the sharing policy: with `SiloBN`, which keeps the
    statistics at the site, an unseen site is scored with the federation's, and with `FedBN` if
    ``fedbn.unseen="average"``.

    Args:
        lambda1: λ₁, the share of the diversified features' loss (CACL).
        lambda2: λ₂, the weight of the features' distance (CAFL).
        distance: ``"sum"`` of the squared differences over the channels (Eq. 3 as printed), or ``"mean"``.

    Deviations:
        Eq. 3 prints the squared norm, a sum over the channels. In our test with the paper's λ₂ = 4 and
        learning rate, the loss of a ResNet-18 from scratch, with 512 feature channels, grew to NaN within ten
        steps. The default is the mean, for which λ₂ = 4 is 4/512 of the sum. The paper does not say which it
        uses.

        The first round has no statistics of the federation, and no second pass; the paper starts from a
        pretrained network. The features of a segmentation network are maps, whose distance is averaged over
        the voxels. The batch's statistics are the local ones for a batch norm of features without extent
        (after a fully connected layer). ``eps`` is part of every σ. Variances are averaged, not standard
        deviations, as FedAvg does with the same buffers. Other ranges of u (Tables 2 and 9) are not offered.
    """

    name = "fedfd"
    requires = frozenset({"labels", "norm_layers"})
    provides = frozenset({"extra_passes"})

    def __init__(
        self, lambda1: Share = 0.1, lambda2: NotNegative = 4.0, distance: Reduction = "mean"
    ) -> None:
        self.lambda1, self.lambda2, self.distance = lambda1, lambda2, distance

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return adaptation.adapt_batch_norm(network)

    def at_site(self, context: SiteContext) -> SitePart:
        return FedFDSite(self, context.network)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(shared_entries(context.network))


class FedFDSite(DiversifiedSite, SiteExchange):
    def __init__(self, method: FedFD, network: nn.Module) -> None:
        super().__init__(network, method.lambda1, method.lambda2, method.distance)
        self.norms = adaptation.adaptive_norms(network)
        self.received: Payload = {}
        self.every_round = self

    def diversified(self) -> AbstractContextManager[Any]:
        return adaptation.interpolating(self.network, adaptation.RandomMix())

    def collect(self) -> Payload:
        return shared_entries(self.network)

    def check(self, payload: Payload) -> None:
        check_variances(payload)

    def apply(self, payload: Payload) -> None:
        for name, norm in self.norms.items():
            mean, var = (payload[entry_key(name, entry)] for entry in _STATISTICS)
            norm.set_global_statistics(mean, var)
        self.received, self.ready = payload, True

    def default_local_entries(self) -> Payload:
        return self.received


def shared_entries(network: nn.Module) -> Payload:
    """Return the running statistics of the adaptive batch norms by state-dict key."""
    return {
        entry_key(name, entry): getattr(norm, entry).detach()
        for name, norm in adaptation.adaptive_norms(network).items()
        for entry in _STATISTICS
    }


def entry_key(name: str, entry: str) -> str:
    """Return the state-dict key of a module's entry."""
    return f"{name}.{entry}" if name else entry
