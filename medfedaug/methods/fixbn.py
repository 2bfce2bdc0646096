"""FixBN: batch norms with fixed statistics of the federation after a part of the rounds."""

import math
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug.methods.arguments import Share
from medfedaug.methods.base import Method, SiteContext, SitePart, check_norms


class FixBN(Method):
    """Batch norm in two stages (Zhong, Chen and Chao, arXiv:2303.06530, 2023).

    The first stage, *exploration*, is FedAvg: in training a batch norm normalises with the mean and variance
    of the batch, and its running statistics are averaged with the weights. In the second stage,
    *calibration*, it normalises in training as in evaluation, with the running statistics
    μ̄ and σ̄² of the global model at the end of the first, ::

        BN(h) = γ (h − μ̄)/√(σ̄² + ε) + β,

    which no longer change; γ and β are still trained. So the gradients of all sites belong to one function,
    and do not depend on the composition of a batch.

    Only the model leaves a site.

    Args:
        exploration: the share of the run's rounds in the first stage, rounded up; a half in the paper. 1
            omits the second stage, and 0, for initial weights with statistics, the first.

    Deviations:
        The paper's text was not available: this follows its abstract and published summaries. The paper also
        keeps the optimiser's momentum from round to round, with and without batch norm; here every round has
        a new optimiser. With methods that keep the statistics at the sites (`FedBN`, `SiloBN`), each site
        fixes its own. The share is of the rounds in the run's configuration: a run cannot be resumed with
        more.
    """

    name = "fixbn"
    requires = frozenset({"fixed_rounds", "norm_layers"})

    def __init__(self, exploration: Share = 0.5) -> None:
        self.exploration = exploration

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Check that the network has statistics to fix."""
        check_norms(self.name, network, _norms(network), "batch norm with running statistics")
        return network

    def at_site(self, context: SiteContext) -> SitePart:
        return FixBNSite(self, context)


class FixBNSite(SitePart):
    """The site's half; ``fixed`` in the second stage."""

    def __init__(self, method: FixBN, context: SiteContext) -> None:
        self.method, self.context = method, context
        self.fixed = False
        for norm in _norms(context.network):
            norm.register_forward_pre_hook(self._fix)

    def _fix(self, norm: nn.Module, _args: tuple[Any, ...]) -> None:
        # At every pass, since `network.train()` also sets its layers.
        if self.fixed:
            norm.eval()

    def start_round(self) -> None:
        first = round(self.method.exploration * self.context.rounds, 6)  # 0.07 · 100 is a little above 7
        self.fixed = self.context.round() > math.ceil(first)

    def end_round(self) -> None:
        """Release the layers for other passes."""
        self.fixed = False


def _norms(network: nn.Module) -> list[_BatchNorm]:
    return [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
