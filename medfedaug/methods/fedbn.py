"""FedBN: normalisation layers stay at their site."""

from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart, check_norms
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext
from medfedaug.methods.exchanges import AverageServer
from medfedaug.models.entries import state_entries

Unseen = Literal["none", "average"]


class KeepsNorms(Method):
    """A method that keeps entries of norm layers at the site; base class of FedBN and SiloBN.

    Args:
        unseen: ``"none"``: an unseen site gets no score. ``"average"``: the average of the sites' entries,
            with the weights of the models.
    """

    requires = frozenset({"norm_layers"})

    def __init__(self, unseen: Unseen = "none") -> None:
        self.unseen = unseen

    def averaged(self, network: nn.Module) -> Payload:
        """Return the entries that leave the site for unseen sites."""
        state = network.state_dict()
        kept = sorted(self.local_entries(network))
        return {key: state[key] for key in kept if state[key].is_floating_point()}

    def at_site(self, context: SiteContext) -> SitePart:
        return SitePart() if self.unseen == "none" else UnseenNorms(self, context)

    def every_round(self, context: ServerContext) -> ServerExchange | None:
        return None if self.unseen == "none" else AverageServer(self.averaged(context.network))


class UnseenNorms(SitePart, SiteExchange):
    """The site's half of `KeepsNorms`."""

    def __init__(self, method: KeepsNorms, context: SiteContext) -> None:
        self.context, self.every_round = context, self
        self.keys = list(method.averaged(context.network))
        self.received: Payload = {}

    def collect(self) -> Payload:
        state = self.context.network.state_dict()
        return {key: state[key] for key in self.keys}

    def apply(self, payload: Payload) -> None:
        self.received = payload

    def default_local_entries(self) -> Payload:
        return self.received


# `_NormBase` is the common base of PyTorch's batch and instance norms.
NORM_LAYERS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm)


class FedBN(KeepsNorms):
    """Average everything but the normalisation layers (Li et al., ICLR 2021).

    Parameters and running statistics of batch, instance, group and layer norms, chosen by module type, are
    neither sent nor received: each site keeps its own across rounds.

    The global model is therefore not complete: its norm entries have the initial values, and a site that did
    not train has no others. ``unseen`` decides how such a site is scored, and does not change a bit of the
    training.

    Args:
        unseen: ``"none"``: an unseen site gets no score, and no normalisation layer leaves its site.
            ``"average"``: the average of the sites' layers, with the weights of the models, as in the model
            that FedAvg would make.

    Exchange, every round, with ``"average"``: the normalisation layers up, their average down, so that they
    leave the site.

    Deviations:
        The paper speaks only of batch norm; here other norms stay too. The papers that test FedBN on unseen
        sites do not say with which layers: FedFD-A aggregates "parameters ... for the global model with the
        same process of FedAvg" (section 4.2) and speaks of averaged statistics, which is ``"average"``;
        FedFA+ (Table 6) says nothing.
    """

    name = "fedbn"

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return all state-dict entries of normalisation layers."""
        entries = state_entries(network, NORM_LAYERS)
        check_norms(self.name, network, entries, "norm layer with weights")
        return entries
