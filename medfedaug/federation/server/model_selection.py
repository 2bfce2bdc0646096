"""Selects the round with the best model."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from torch import Tensor

from medfedaug.methods.base import Payload


class Selection:
    """The first global model with the best unweighted mean of the sites' validation scores.

    Two models are compared over the sites that scored both: a round without the score of a hard site must
    not gain from that. If no site scored both, their means are compared.
    """

    def __init__(self, *, higher_is_better: bool = True) -> None:
        self.higher_is_better, self._sign = higher_is_better, 1 if higher_is_better else -1
        self.round = 0
        self.state: dict[str, Tensor] = {}
        self.payload: Payload = {}
        self._scores: dict[str, float] = {}

    def offer(
        self, round_: int, scores: Mapping[str, float], state: Mapping[str, Tensor], payload: Payload
    ) -> None:
        """Select a model if it is better than the best so far."""
        if scores and (not self._scores or self._better(scores)):
            self._scores = dict(scores)
            self.take(round_, state, payload)

    def _better(self, scores: Mapping[str, float]) -> bool:
        both = [site for site in scores if site in self._scores]
        new = [scores[site] for site in both] or list(scores.values())
        best = [self._scores[site] for site in both] or list(self._scores.values())
        return self._sign * fmean(new) > self._sign * fmean(best)

    def take(self, round_: int, state: Mapping[str, Tensor], payload: Payload) -> None:
        """Select a model without a score."""
        self.round = round_
        self.state = {key: value.clone() for key, value in state.items()}
        self.payload = dict(payload)

    def saved(self) -> dict[str, Any]:
        """Return the selection's part of a checkpoint."""
        return {
            "selected_round": self.round,
            "selected_model": self.state,
            "selected_payload": self.payload,
            "selected_scores": self._scores,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `saved` returned."""
        self.round = saved["selected_round"]
        self._scores = saved["selected_scores"]
        self.state, self.payload = saved["selected_model"], saved["selected_payload"]
