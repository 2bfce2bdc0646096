"""FixBN: batch norms keep the federation's statistics after a part of the rounds."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug.errors import WITH_BATCH_NORM, ConfigError
from medfedaug.methods.arguments import Share
from medfedaug.methods.base import Method, SiteContext, SitePart


class FixBN(Method):
    r"""Batch norm in two stages (Zhong, Chen and Chao, arXiv:2303.06530, 2023).

    In the first stage, *exploration*, everything is as in FedAvg: in training a batch norm normalises with
    the mean and variance of the batch, and its running statistics are averaged with the weights. In the
    second stage, *calibration*, it normalises in training as in evaluation, with the running statistics
    :math:`\bar\mu, \bar\sigma^2` of the global model at the end of the first,

    .. math:: \mathrm{BN}(h) = \gamma\, \frac{h - \bar\mu}{\sqrt{\bar\sigma^2 + \epsilon}} + \beta,

    which no longer change, neither at a site nor at the server; γ and β are trained on. So the gradients of
    all sites are those of one function, and none depends on which images share a batch.

    Nothing leaves a site beside the model.

    Args:
        exploration: the share of the run's rounds in the first stage, rounded up; the paper's is a half. With
            1 there is no second stage, and with 0 no first, which is for initial weights with statistics.

    Raises:
        ConfigError: for a share outside [0, 1], and for a network without batch norms that keep statistics.

    Deviations:
        The paper's text was not at hand: this follows its abstract and published summaries. The paper also
        keeps the optimiser's momentum from one round to the next, for batch norm or without; here every
        round has a new optimiser. Where the statistics stay at the sites (`FedBN`, `SiloBN`), those that are
        fixed are each site's own. The share is of the rounds that the run is configured for: it cannot be
        resumed with more.
    """

    name = "fixbn"
    capturable = True
    requires = frozenset({"fixed_rounds", "norm_layers"})

    def __init__(self, exploration: Share = 0.5) -> None:
        self.exploration = exploration

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Check that there are statistics to be fixed."""
        if not _norms(network):
            raise ConfigError(
                f"fixbn: {type(network).__name__} has no batch norm that keeps statistics; {WITH_BATCH_NORM}"
            )
        return network

    def at_site(self, context: SiteContext) -> SitePart:
        return FixBNSite(self, context)


class FixBNSite(SitePart):
    """Site's half: the stage follows from the round.

    Attributes:
        fixed: whether batch norms are in the second stage.
    """

    def __init__(self, method: FixBN, context: SiteContext) -> None:
        self.method, self.context = method, context
        self.fixed = False
        for norm in _norms(context.network):
            norm.register_forward_pre_hook(self._fix)

    def _fix(self, norm: nn.Module, _args: tuple[Any, ...]) -> None:
        # At every pass, since a network that begins to train takes all of its layers along.
        if self.fixed:
            norm.eval()

    def start_round(self) -> None:
        """Find out which stage the round belongs to."""
        first = round(self.method.exploration * self.context.rounds, 6)  # 0.07 · 100 is a little above 7
        self.fixed = self.context.round() > math.ceil(first)

    def end_round(self) -> None:
        """Leave the layers to whoever needs them otherwise."""
        self.fixed = False


def _norms(network: nn.Module) -> list[_BatchNorm]:
    return [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
