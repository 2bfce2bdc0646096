"""Krum: the model of the site with which most others agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medfedaug import functional as F
from medfedaug.methods.arguments import AtLeastOne
from medfedaug.methods.base import Aggregator, Method, RoundMean, ServerContext, shared_parameters
from medfedaug.methods.kept import KeptUpdates, stacked


class Krum(Method):
    """The one site's model that is nearest to others (Blanchard et al., NeurIPS 2017).

        w ← wᵢ with the smallest s(i) = Σ ‖wᵢ − wⱼ‖² over the n − f − 2 sites j nearest to i,

    with norms over all parameters. The paper's condition is n ≥ 2f + 3, and so a round needs as many updates:
    5 for f = 1, 7 for f = 2.

    Numbers of samples: not used; every site counts as one.

    Args:
        hostile: f, at most so many sites of a round may be hostile.

    Raises:
        ConfigError: for f below 1, or where no parameter is averaged.

    Deviations:
        The paper chooses among gradients; here they are models after local training, of which one alone
        becomes the global model: that of a single hospital. Running statistics of norm layers take no part
        in the choice. They are those of the chosen site, clamped to the range of all sites' without the f
        largest and smallest of each coordinate, so that a chosen site cannot spoil them. Of sites with equal
        scores the first by name is chosen.
    """

    name = "krum"
    requires = frozenset({"averaged_parameters"})

    def __init__(self, hostile: AtLeastOne = 1) -> None:
        self.hostile, self.keep = hostile, 1

    def aggregator(self, context: ServerContext) -> Aggregator:
        return KrumServer(context, self.name, self.hostile, self.keep)


class KrumServer(KeptUpdates):
    """The server's half, of `multi_krum` too.

    Args:
        context: the federation.
        method: the method's name, for its messages.
        hostile: f.
        keep: the number of models whose mean is taken; 0 for all but f.
    """

    def __init__(self, context: ServerContext, method: str, hostile: int, keep: int) -> None:
        super().__init__()
        self.keys = list(shared_parameters(context, method))
        self.hostile, self.keep, self.min_updates = hostile, keep, max(2 * hostile + 3, keep + hostile)
        self.chosen: list[str] = []

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """The mean of the chosen models."""
        models = self.take()
        distances = torch.zeros(len(models), len(models), dtype=torch.float64)
        for key in self.keys:
            values = stacked(models, key).flatten(1)
            # Row by row, and not as ‖a‖² + ‖b‖² − 2ab, whose rounding hides small distances of large models.
            distances += torch.stack([(values - row).square().sum(dim=1) for row in values]).cpu()
        scores = F.krum_scores(distances, self.hostile)
        best = sorted(range(len(models)), key=lambda index: (float(scores[index]), index))
        chosen = sorted(best[: self.keep or len(models) - self.hostile])
        self.chosen = [list(models)[index] for index in chosen]
        new = {}
        for key in round_.mean:
            values = stacked(models, key)
            mean = values[chosen].mean(dim=0)
            new[key] = (mean if key in self.keys else F.within_middle(mean, values, self.hostile)).float()
        return new

    def summary(self) -> dict[str, Any]:
        """The chosen sites."""
        return {"chosen": self.chosen}
