"""Norm layers for an unseen site, in methods whose sites keep norm layers."""

from typing import Literal

from torch import nn

from medfedaug.methods.average import AverageServer
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext

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
