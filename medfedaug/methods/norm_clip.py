"""Norm clipping: a limit on the norm of each site's update."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from medfedaug import functional as F
from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Aggregator, Method, RoundMean, ServerContext, shared_parameters
from medfedaug.methods.kept import KeptUpdates, moved, stacked, update_norms


class NormClip(Method):
    """Norm bounding of the sites' updates (Sun et al., "Can You Really Backdoor Federated Learning?", 2019).

        w ← w + Σₖ pₖ Δₖ · min(1, M/‖Δₖ‖),    Δₖ = wₖ − w,

    with the norm over all parameters together. It limits the length of a site's step in a round, and not its
    direction: a hostile site keeps its share pₖ of every round. Any number of sites may be hostile.

    Numbers of samples: pₖ are the sites' usual shares, so that a site's claim counts; limit it with
    ``max_share`` of `medfedaug.config.run.RunConfig`.

    Args:
        limit: M; 0 for the (lower) median of the norms of the round's updates, which a minority of the sites
            cannot choose.

    Raises:
        ConfigError: for a limit below 0, or when no parameter is averaged.

    Deviations:
        The paper has a constant M, and optional noise on the sum, which is missing here. The mean of running
        statistics, which are no parameters, is clamped, coordinate by coordinate, to the middle of the sites'
        values: to their median for an odd number of sites.
    """

    name = "norm_clip"
    requires = frozenset({"averaged_parameters"})

    def __init__(self, limit: NotNegative = 0.0) -> None:
        self.limit = limit

    def aggregator(self, context: ServerContext) -> Aggregator:
        return NormClipServer(context, self.limit)


class NormClipServer(KeptUpdates):
    counts_samples = True

    def __init__(self, context: ServerContext, limit: float) -> None:
        super().__init__()
        self.keys, self.fixed = list(shared_parameters(context, NormClip.name)), limit
        self.limit, self.clipped = limit, list[str]()

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Return the mean of the clipped updates."""
        models, previous = self.take(), round_.previous
        norms = update_norms(models, previous, self.keys)
        self.limit = self.fixed or sorted(norms.values())[(len(norms) - 1) // 2]
        self.clipped = [site for site, norm in norms.items() if norm > self.limit]
        total = sum(round_.weights.values())
        factors = [round_.weights[s] / total * F.clip_factor(norms[s], self.limit) for s in models]
        new = {}
        for key, mean in round_.mean.items():
            if key in self.keys:
                new[key] = moved(models, previous, key, factors).float()
            else:
                values = stacked(models, key)
                new[key] = F.within_middle(mean.double(), values, (len(values) - 1) // 2).float()
        return new

    def summary(self) -> dict[str, Any]:
        return {"limit": self.limit, "clipped": self.clipped}
