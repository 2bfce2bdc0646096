"""Norm layers for an unseen site, in methods whose sites keep norm layers."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from medfedaug.methods.average import AverageServer
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext

Unseen = Literal["none", "average", "own"]
_STATISTICS = ("running_mean", "running_var")


class KeepsNorms(Method):
    """A method that keeps entries of norm layers at the site; base class of FedBN and SiloBN.

    Args:
        unseen: ``"none"``: an unseen site gets no score. ``"average"``: the average of the sites' entries,
            with the weights of the models. ``"own"``: running statistics of the unseen site's images, and the
            average of the other entries.

    Raises:
        ConfigError: for another word.
    """

    requires = frozenset({"norm_layers"})

    def __init__(self, unseen: Unseen = "none") -> None:
        self.unseen = unseen

    def averaged(self, network: nn.Module) -> Payload:
        """Return the entries that leave the site for unseen sites."""
        if self.unseen == "none":
            return {}
        state = network.state_dict()
        return {
            key: state[key]
            for key in sorted(self.local_entries(network))
            if state[key].is_floating_point()
            and not (self.unseen == "own" and key.rpartition(".")[2] in _STATISTICS)
        }

    def at_site(self, context: SiteContext) -> SitePart:
        return SitePart() if self.unseen == "none" else UnseenNorms(self, context)

    def every_round(self, context: ServerContext) -> ServerExchange | None:
        sent = self.averaged(context.network)
        return AverageServer(sent) if sent else None


class UnseenNorms(SitePart, SiteExchange):
    """The site's half of `KeepsNorms`."""

    def __init__(self, method: KeepsNorms, context: SiteContext) -> None:
        self.method, self.context = method, context
        self.keys = list(method.averaged(context.network))
        self.every_round = self if self.keys else None
        self.received: Payload = {}

    def collect(self) -> Payload:
        state = self.context.network.state_dict()
        return {key: state[key] for key in self.keys}

    def apply(self, payload: Payload) -> None:
        self.received = payload

    def default_local_entries(self) -> Payload:
        if self.method.unseen != "own":
            return self.received
        network = self.context.network
        network.load_state_dict(self.received, strict=False)
        norms = {
            name: norm
            for name, norm in network.named_modules()
            if isinstance(norm, _NormBase) and norm.running_mean is not None
        }
        _take_statistics(norms.values(), self.context.pass_own_images)
        state = network.state_dict()
        own = (f"{name}.{entry}" for name in norms for entry in _STATISTICS)
        return {**self.received, **{key: state[key] for key in own}}


def _take_statistics(norms: Iterable[_NormBase], run: Callable[[], None]) -> None:
    """Set running statistics to the averages over the batches of ``run``, weighted by their images.

    The layers normalise with the statistics of the batch, so that later layers get the same input as with the
    result. A batch of one value per channel has no statistics: the average so far normalises it.
    """
    seen: dict[nn.Module, int] = {}

    def observe(norm: _NormBase, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0]
        norm.training = x.numel() // x.shape[1] > 1
        if norm.training:
            seen[norm] = seen.get(norm, 0) + len(x)
            norm.momentum = len(x) / seen[norm]

    momenta = [(norm, norm.momentum) for norm in norms]
    handles = [norm.register_forward_pre_hook(observe) for norm, _ in momenta]
    try:
        for norm, _ in momenta:
            norm.reset_running_stats()
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
        for norm, momentum in momenta:
            norm.momentum, norm.training = momentum, False
