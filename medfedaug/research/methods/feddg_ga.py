"""FedDG-GA: higher weights in the mean for sites whose own model is better than the global one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medfedaug.functional.means import WeightedMean
from medfedaug.methods.arguments import Share
from medfedaug.methods.base import (
    Aggregator,
    Method,
    ServerExchange,
    SiteExchange,
    SitePart,
    shared_parameters,
)
from medfedaug.methods.contexts import Payload, RoundMean, ServerContext, SiteContext, SiteUpdate
from medfedaug.methods.exchanges import AggregatorExchange, KeptUpdates

_LEAST = 1e-3


class FedDGGA(Method):
    """Generalization adjustment of the weights in the mean (Zhang et al., FedDG-GA, CVPR 2023).

    After round r the *generalization gap* of site i is the growth of its loss when its model is averaged with
    the others, ::

        Gᵢ = Eᵢ(wʳ⁺¹) − Eᵢ(wᵢʳ),   wʳ⁺¹ = Σᵢ aᵢ wᵢʳ,

    and the weights of the next round move towards sites with large gaps, ::

        aᵢ ← aᵢ + dʳ (Gᵢ − μ) / (max_j |Gⱼ − μ|),   dʳ = (1 − r/R) d,

    with the mean μ of the gaps and r = 0, 1, ..., R - 1. Then they are clipped to [0, 1] and divided by their
    sum. They start as 1/N for N sites, whatever their number of images.

    The loss Eᵢ is the mean of the task's loss over the site's training images, in evaluation.

    Args:
        step: d, between 0 and 1. With 0 all sites weigh the same.

    Exchange, every round: ``loss`` (2,) up, Eᵢ of the received and of the sent model, nothing down. Losses
    stay at a site of a real federation, so the method runs in simulations only. The server keeps
    the models of a round until its end. A site's weight depends on losses that it reports itself, and no
    limit on a site's share applies.

    Deviations:
        The paper's text was not available: the library fl4health quotes the equations from it. The paper's
        public code omits μ, multiplies d by 1/3, the initial weight of its three sites, and computes the
        gaps, by default of the accuracy, on validation images; here these select the round, and nothing is
        fitted to them. The gap of a site that missed rounds is to the model that it last sent. Sites that
        miss a round keep their weights, and the others divide theirs; a site that joins later starts with 1/N
        for the N sites at that time. Before the division weights are clipped to 0.001 instead of 0: a round
        with sites of weight 0 alone would have no mean, and their weights would stay 0. Equal gaps change
        nothing.
    """

    name = "feddg_ga"
    requires = frozenset({"averaged_parameters", "fixed_rounds", "same_start"})
    excludes = frozenset({"counted_patients", "given_shares"})

    def __init__(self, step: Share = 0.2) -> None:
        self.step = step

    def at_site(self, context: SiteContext) -> SitePart:
        shared_parameters(context, self.name)
        return FedDGGASite(context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return _Losses()

    def aggregator(self, context: ServerContext) -> Aggregator:
        return _Adjusted(self.step, context)


class FedDGGASite(SitePart, SiteExchange):
    """The site's half: the losses of the received and of the trained model."""

    def __init__(self, context: SiteContext) -> None:
        self.context, self.every_round = context, self
        self.received = self.trained = 0.0

    def start_round(self) -> None:
        self.received = self.context.training_loss()

    def end_round(self) -> None:
        self.trained = self.context.training_loss()

    def metrics(self) -> dict[str, float]:
        return {"loss_received": self.received, "loss_trained": self.trained}

    def collect(self) -> Payload:
        return {"loss": torch.tensor([self.received, self.trained], dtype=torch.float64)}

    def apply(self, payload: Payload) -> None:
        """Nothing comes back."""


class _Losses(AggregatorExchange):
    """The losses for the aggregator."""

    shapes = {"loss": (2,)}  # noqa: RUF012


class _Adjusted(KeptUpdates):
    """The mean of the models with adjusted weights.

    Attributes:
        weights: a, of every participant so far.
        last: the loss of each site's model when it last sent one.
    """

    def __init__(self, step: float, context: ServerContext) -> None:
        super().__init__()
        shared_parameters(context, FedDGGA.name)
        self.step, self.context = step, context
        self.weights: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self._losses: dict[str, tuple[float, float]] = {}

    def accept(self, update: SiteUpdate) -> None:
        super().accept(update)
        received, trained = update.payload["loss"].tolist()
        self._losses[update.site] = (received, trained)

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        models, losses, self._losses = self.take(), self._losses, {}
        for site in models:
            self.weights.setdefault(site, 1 / max(len(self.context.weights()), 1))
        self._adjust({site: losses[site][0] for site in models}, round_.round)
        self.last.update({site: trained for site, (_, trained) in losses.items()})
        mean = WeightedMean()
        for site, model in models.items():
            mean.add(model, self.weights[site])
        return mean.result()

    def _adjust(self, received: Mapping[str, float], round_: int) -> None:
        gaps = {site: loss - self.last[site] for site, loss in received.items() if site in self.last}
        if not gaps:
            return
        mean = sum(gaps.values()) / len(gaps)
        largest = max(abs(gap - mean) for gap in gaps.values())
        if not largest:
            return
        step = self.step * (1 - (round_ - 2) / self.context.rounds)  # round 1 gives the gaps of r = 0
        before = sum(self.weights[site] for site in gaps)
        moved = {
            site: min(max(self.weights[site] + step * (gap - mean) / largest, _LEAST), 1.0)
            for site, gap in gaps.items()
        }
        scale = before / sum(moved.values())
        self.weights.update({site: weight * scale for site, weight in moved.items()})

    def summary(self) -> dict[str, Any]:
        return {"weights": dict(sorted(self.weights.items()))}

    def state(self) -> Payload:
        rows = {site: [weight, self.last[site]] for site, weight in self.weights.items()}
        return {site: torch.tensor(row, dtype=torch.float64) for site, row in rows.items()}

    def restore(self, state: Payload) -> None:
        self.weights = {site: float(value[0]) for site, value in state.items()}
        self.last = {site: float(value[1]) for site, value in state.items()}
