"""BIN: batch norms that learn, for each channel, the share of an image's own statistics."""

import torch
from torch import nn

from medfedaug.methods.arguments import Positive
from medfedaug.methods.average import AveragedParameters, AverageServer
from medfedaug.methods.base import Method, ServerContext, ServerExchange, SiteContext, SitePart, Step
from medfedaug.research.layers.batch_instance_norm import batch_shares, mix_instance_norms


class BIN(Method):
    """Batch-instance normalisation (Nam and Kim, NeurIPS 2018), with which FedFD-A compares its adapter.

    Every batch norm returns ``(ρ x̂_B + (1 − ρ) x̂_I) γ + β``
    (`medfedaug.research.layers.batch_instance_norm`). ρ is trained with the network and clipped to [0, 1]
    after each step.

    Exchange, every round and batch norm, in simulations only, since clipping after a long step leaves the
    sign of the last batch's gradient: ρ, (C,), up; the average down, which a finished run keeps.

    Args:
        rate: factor of the gradient of ρ; for SGD, of its learning rate.

    Raises:
        ConfigError: for a ``rate`` that is not positive.
        ValueError: for a network without batch norms that keep statistics.

    Deviations:
        Neither the paper's text nor FedFD-A's settings were available. The run's weight decay and momentum
        act on ρ too. Batch norms of features without spatial dimensions stay as they are.
    """

    name = "bin"
    requires = frozenset({"norm_layers"})
    excludes = frozenset({"complete_state_dict", "counted_patients"})

    def __init__(self, rate: Positive = 1.0) -> None:
        self.rate = rate

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return mix_instance_norms(network)

    def at_site(self, context: SiteContext) -> SitePart:
        return BINSite(self.rate, context.network)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(batch_shares(context.network))


class BINSite(AveragedParameters):
    """The site's half: ρ stays in [0, 1]."""

    def __init__(self, rate: float, network: nn.Module) -> None:
        super().__init__(batch_shares(network))
        self.rate = rate

    def before_step(self, step: Step) -> None:
        for rho in self.parameters.values():
            if rho.grad is not None and self.rate != 1:
                rho.grad.mul_(self.rate)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        for rho in self.parameters.values():
            rho.clamp_(0.0, 1.0)
