"""Norm clipping: no site's update is longer than a limit."""

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

    with the norm over all parameters together. It limits how far a site moves the model in a round, and not
    where to: a hostile site keeps its share pₖ of every round. It assumes nothing of their number.

    Numbers of samples: pₖ are the sites' usual shares, so that a site's claim counts; limit it with
    ``max_share`` of `medfedaug.config.run.RunConfig`.

    Args:
        limit: M; 0 for the median of the norms of the round's updates (of an even number the lower one in the
            middle), which fewer than half of the sites cannot choose.

    Raises:
        ConfigError: for a limit below 0, or where no parameter is averaged.

    Deviations:
        The paper has a constant M, and noise added to the sum as an option, which is left out. Running
        statistics of norm layers are no parameters, and their mean is not clipped but clamped, coordinate by
        coordinate, to the middle of the sites' values: to their median where their number is odd.
    """

    name = "norm_clip"
    requires = frozenset({"averaged_parameters"})

    def __init__(self, limit: NotNegative = 0.0) -> None:
        self.limit = limit

    def aggregator(self, context: ServerContext) -> Aggregator:
        return NormClipServer(context, self.limit)


class NormClipServer(KeptUpdates):
    """The server's half."""

    counts_samples = True

    def __init__(self, context: ServerContext, limit: float) -> None:
        super().__init__()
        self.keys, self.fixed = list(shared_parameters(context, NormClip.name)), limit
        self.limit, self.clipped = limit, list[str]()

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """The mean of the clipped updates."""
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
        """The limit, and the sites whose updates were longer."""
        return {"limit": self.limit, "clipped": self.clipped}
