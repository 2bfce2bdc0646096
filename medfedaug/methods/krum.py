"""Krum: the model with which most other sites agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medfedaug import functional as F
from medfedaug.methods.arguments import AtLeastOne
from medfedaug.methods.base import Aggregator, Method, RoundMean, ServerContext, shared_parameters
from medfedaug.methods.kept import KeptUpdates, stacked


class Krum(Method):
    """One site's model, the nearest to other sites' models (Blanchard et al., NeurIPS 2017).

        w ← wᵢ with the smallest s(i) = Σ ‖wᵢ − wⱼ‖² over the n − f − 2 sites j nearest to i,

    with norms over all parameters. The paper's condition n ≥ 2f + 3 is the number of updates that a round
    needs: 5 for f = 1, 7 for f = 2.

    Numbers of samples: not used; every site counts as one.

    Args:
        hostile: f, the largest number of hostile sites in a round.

    Raises:
        ConfigError: for f below 1, or when no parameter is averaged.

    Deviations:
        The paper chooses among gradients, this method among models after local training, so that the model
        of a single hospital becomes the global one. Running statistics of norm layers do not enter the
        choice. They are the chosen site's, clamped to the range of all sites' values without the f largest
        and smallest of each coordinate, so that a chosen hostile site cannot spoil them. The first by name of
        sites with equal scores is chosen.
    """

    name = "krum"
    requires = frozenset({"averaged_parameters"})

    def __init__(self, hostile: AtLeastOne = 1) -> None:
        self.hostile, self.keep = hostile, 1

    def aggregator(self, context: ServerContext) -> Aggregator:
        return KrumServer(context, self.name, self.hostile, self.keep)


class KrumServer(KeptUpdates):
    """The server's half, of `multi_krum` too, with the mean of ``keep`` models; 0 for all but f."""

    def __init__(self, context: ServerContext, method: str, hostile: int, keep: int) -> None:
        super().__init__()
        self.keys = list(shared_parameters(context, method))
        self.hostile, self.keep, self.min_updates = hostile, keep, max(2 * hostile + 3, keep + hostile)
        self.chosen: list[str] = []

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Return the mean of the chosen models."""
        models = self.take()
        distances = torch.zeros(len(models), len(models), dtype=torch.float64)
        for key in self.keys:
            values = stacked(models, key).flatten(1)
            # Row by row: the rounding of ‖a‖² + ‖b‖² − 2ab would hide small distances of large models.
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
        return {"chosen": self.chosen}
