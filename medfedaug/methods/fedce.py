"""FedCE: weights in the mean by each site's contribution, in directions of updates and in errors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from medfedaug.methods.base import (
    Aggregator,
    Method,
    ServerExchange,
    SiteExchange,
    SitePart,
    shared_parameters,
)
from medfedaug.methods.contexts import Payload, RoundMean, ServerContext, SiteContext, SiteUpdate
from medfedaug.methods.kept import AggregatorExchange, KeptUpdates, flattened, weighted_mean

_LEAST = 1e-3


class FedCE(Method):
    """Aggregation weights by contribution estimation (Jiang et al., FedCE, CVPR 2023).

    With the update ``uₖ = wₖ − w`` of site k and the weights pₖ of the last round, 1/N in the
    first, the server compares each update with those of all others, ::

        cₖ = cos(uₖ, Σ_(j≠k) pⱼ uⱼ),

    and each site computes the error eₖ of the model without its contribution, ::

        w₋ₖ = (w − pₖ wₖ) / (1 − pₖ).

    Both are averaged over the rounds so far. The new weights are the sum of the two shares, ::

        pₖ ∝ (1 − c̄ₖ) / (Σⱼ (1 − c̄ⱼ)) + ēₖ/(Σⱼ ēⱼ),

    or their product. A site whose data differ from the others' counts more.

    The error is the mean of the task's loss over the site's training images, in evaluation.

    Args:
        mode: ``"plus"`` for the sum, ``"times"`` for the product.

    Exchange, every round: ``error`` (2,) up, the sum of a site's errors so far and their number; down
    ``weight/<site>`` (1,) for every site of the round. Losses stay at a site of a real federation, so the
    method runs in simulations only. The server keeps the models of a round until its end. A site's weight
    depends on numbers that it reports itself, and no limit on a site's share applies.

    Raises:
        ConfigError: for another ``mode``, when no parameter is averaged, and for a method with weights or
            statistics outside of the state dict, which the models without a site could not have.

    Deviations:
        The paper's text was not available: this follows the authors' code for NVFlare and the published
        descriptions. There the error is one minus the Dice of validation images; here these select the round,
        and nothing is fitted to them. The code counts an error of 1 for the first round, which has no
        w₋ₖ; here that round adds none, and neither does a round after one that the site missed,
        since the received model then has no part of it. A site without any error gets the mean of the
        others'. The code of 2023 compares with equal weights in every round; NVFlare 2.9, which has the
        method too, with those of the last round, as here. Shares are at least 0.001, as in that code. The
        direction is over the averaged trainable parameters.
    """

    name = "fedce"
    requires = frozenset({"averaged_parameters", "complete_state_dict", "global_start", "same_start"})
    excludes = frozenset({"counted_patients", "given_shares"})

    def __init__(self, mode: Literal["plus", "times"] = "plus") -> None:
        self.mode = mode

    def at_site(self, context: SiteContext) -> SitePart:
        shared_parameters(context, self.name)
        return FedCESite(context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return _Errors()

    def aggregator(self, context: ServerContext) -> Aggregator:
        return FedCEServer(self.mode, context)


class FedCESite(SitePart, SiteExchange):
    """The site's half.

    Attributes:
        previous: the entries of the model that the site trained last; empty before.
        last: the round of that model.
        errors: the sum of the errors and their number, (2,).
        weights: p of the last round, by site.
    """

    def __init__(self, context: SiteContext) -> None:
        self.context, self.every_round = context, self
        self.previous: Payload = {}
        self.last = 0
        self.errors = torch.zeros(2, dtype=torch.float64)
        self.weights: dict[str, float] = {}

    def start_round(self) -> None:
        """Compute the error of the model without this site, if the received model has a part of it."""
        share = self.weights.get(self.context.name, 0.0)
        if not self.previous or self.last != self.context.round() - 1 or not 0 < share < 1:
            return
        received = _entries(self.context.network)
        without = {
            key: (received[key] - share * old) / (1 - share)
            for key, old in self.previous.items()
            if key not in self.context.local_entries
        }
        error = self.context.training_loss("fedce/error", without)
        self.errors = self.errors + torch.tensor([error, 1.0], dtype=torch.float64)

    def end_round(self) -> None:
        self.previous, self.last = _entries(self.context.network), self.context.round()

    def metrics(self) -> dict[str, float]:
        return {"error": float(self.errors[0] / self.errors[1])} if self.errors[1] else {}

    def collect(self) -> Payload:
        return {"error": self.errors.float()}

    def apply(self, payload: Payload) -> None:
        self.weights = {key.removeprefix("weight/"): float(value) for key, value in payload.items()}

    def state(self) -> Payload:
        numbers = torch.cat([self.errors, torch.tensor([float(self.last)], dtype=torch.float64)])
        return {"numbers": numbers, **{f"model/{key}": value for key, value in self.previous.items()}}

    def restore(self, state: Payload) -> None:
        self.errors, self.last = state["numbers"][:2].cpu(), int(state["numbers"][2])
        entries = (key for key in state if key != "numbers")
        self.previous = {key.removeprefix("model/"): state[key].to(self.context.device) for key in entries}


class _Errors(AggregatorExchange):
    """The errors for the aggregator, which also sends the sites their message."""

    shapes = {"error": (2,)}  # noqa: RUF012

    def check(self, payload: Payload) -> None:
        if bool((payload["error"] < 0).any()):
            raise ValueError("error is negative, and a sum of losses cannot be")


class FedCEServer(KeptUpdates):
    """The server's half.

    Attributes:
        weights: p of every site, after its last round.
        cosines: for every site the sum of c and the number of rounds.
    """

    def __init__(self, mode: str, context: ServerContext) -> None:
        super().__init__()
        self.mode, self.context = mode, context
        self.compared = list(shared_parameters(context, FedCE.name))
        self.weights: dict[str, float] = {}
        self.cosines: dict[str, Tensor] = {}
        self._errors: dict[str, Tensor] = {}
        self._sites: list[str] = []

    def accept(self, update: SiteUpdate) -> None:
        super().accept(update)
        self._errors[update.site] = update.payload["error"].double().cpu()

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Estimate the contributions, and average the models with them."""
        models, errors, self._errors = self.take(), self._errors, {}
        self._sites = list(models)
        for site in models:
            self.weights.setdefault(site, 1 / max(len(self.context.weights()), 1))
        updates = torch.stack([flattened(model, self.compared) for model in models.values()])
        updates -= flattened(round_.previous, self.compared)
        weighted = updates * torch.tensor([[self.weights[site]] for site in models], dtype=torch.float64)
        cosines = torch.cosine_similarity(updates, weighted.sum(dim=0) - weighted, dim=1)
        for site, cosine in zip(models, cosines.tolist(), strict=True):
            term = torch.tensor([cosine, 1.0], dtype=torch.float64)
            self.cosines[site] = self.cosines.get(site, torch.zeros_like(term)) + term
        unlike = torch.stack([1 - self.cosines[site][0] / self.cosines[site][1] for site in models])
        contributions = self._combined(_shares(unlike), _shares(_means([errors[site] for site in models])))
        self.weights.update(zip(models, contributions.tolist(), strict=True))
        return weighted_mean(models, self.weights)

    def _combined(self, cosines: Tensor, errors: Tensor) -> Tensor:
        both = cosines + errors if self.mode == "plus" else cosines * errors
        return _shares(both / both.sum())

    def message(self) -> Payload:
        return {f"weight/{site}": torch.tensor([self.weights[site]]) for site in self._sites}

    def summary(self) -> dict[str, Any]:
        return {"weights": {site: self.weights[site] for site in self._sites}}

    def state(self) -> Payload:
        return {
            site: torch.cat([torch.tensor([weight], dtype=torch.float64), self.cosines[site]])
            for site, weight in self.weights.items()
        }

    def restore(self, state: Payload) -> None:
        self.weights = {site: float(value[0]) for site, value in state.items()}
        self.cosines = {site: value[1:].clone() for site, value in state.items()}


def _means(errors: list[Tensor]) -> Tensor:
    """Return the mean error of each site; the mean of the others' for a site without errors."""
    known = [float(error[0] / error[1]) for error in errors if error[1] > 0]
    middle = sum(known) / len(known) if known else 1.0
    return torch.tensor([float(error[0] / error[1]) if error[1] > 0 else middle for error in errors]).double()


def _shares(values: Tensor) -> Tensor:
    """Return shares of at least 0.001 that add up to 1, equal if all values are 0."""
    total = values.sum()
    shares = values / total if total > 0 else torch.full_like(values, 1 / len(values))
    shares = shares.clamp_min(_LEAST)
    return shares / shares.sum()


def _entries(network: nn.Module) -> Payload:
    return {key: v.detach().clone() for key, v in network.state_dict().items() if v.is_floating_point()}
