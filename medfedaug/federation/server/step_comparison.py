"""Compare the sites' steps of a round: shorten long steps, and name suspected sites.

Each site is compared with the other sites alone, so that a long step does not widen its own limit. With fewer
than half of the sites dishonest, the upper median of the others' lengths lies between the shortest and the
longest honest step. Of two sites nobody can tell which one is wrong.

A site with more samples takes more training steps, and the length of its update grows about with the root of
their number. Lengths are therefore divided by the root of the site's weight in the mean, which ``max_share``
limits: claimed samples lengthen a step no more than that.

A shortened step keeps its direction. Directions are compared with the mean of the others' directions, in
which every site counts alike. A site is suspected if its step stands apart and the others' validation is no
better after it. That is a reason to look at the site, and no proof: its step counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medfedaug.federation.messages.site_sampling import LEAST_SITES
from medfedaug.federation.messages.tensor_checks import StateDictValidator
from medfedaug.functional.robust import clip_factor

# Multiples of the limit: running statistics of honest sites differ more than their parameters.
_ALLOWED = {"parameters": 1.0, "buffers": 2.0}
# A cosine below it points against the others: about 1 of 800 honest steps, and nearly all steps of sites that
# went backwards or trained with exchanged labels, from the second round on.
_AGAINST = -0.25
# Steps of a larger multiple stand apart. The largest of an honest site with 20 times the samples was 8.
_FAR = 10.0


@dataclass(frozen=True)
class ComparedStep:
    """A site's step in a round, measured by the other sites' steps.

    Args:
        times: the length for the site's weight, of parameters and buffers, in multiples of the others'
            median; 0 if the others did not move.
        factors: the used factor of the step, of parameters and buffers; 1 for the whole step.
        cosine: between the step of the parameters and the mean of the others' directions.
    """

    times: Mapping[str, float]
    factors: Mapping[str, float]
    cosine: float

    @property
    def shortened(self) -> bool:
        """Return whether only a part of the step is used."""
        return min(self.factors.values()) < 1

    def to_results(self) -> dict[str, float]:
        """Return the numbers for ``results.json``, rounded, since exact ones depend on single images."""
        lengths = {what: float(round(times)) for what, times in self.times.items()}
        return {**lengths, "cosine": round(self.cosine, 1)}


class StepComparison:
    """Limits each site's step, relative to its weight, to a multiple of the others' median."""

    def __init__(self, model: StateDictValidator, limit: float) -> None:
        self.model, self.limit = model, limit

    def compare(
        self,
        updates: Mapping[str, Mapping[str, Tensor]],
        steps: Mapping[str, Mapping[str, float]],
        weights: Mapping[str, float],
        state: Mapping[str, Tensor],
    ) -> dict[str, ComparedStep]:
        """Compare the steps of a round; return nothing for fewer than three sites."""
        if len(updates) < LEAST_SITES:
            return {}
        lengths = {w: {site: steps[site][w] / math.sqrt(weights[site]) for site in updates} for w in _ALLOWED}
        usual = {what: others_median(by_site) for what, by_site in lengths.items()}
        cosines = self._cosines(updates, steps, state)
        compared = {}
        for site in updates:
            medians = {what: by_site[site] for what, by_site in usual.items()}
            times = {what: lengths[what][site] / m if m else 0.0 for what, m in medians.items()}
            factors = {what: clip_factor(times[what], self.limit * most) for what, most in _ALLOWED.items()}
            compared[site] = ComparedStep(times, factors, cosines[site])
        return compared

    def used(
        self, weights: dict[str, Tensor], compared: ComparedStep, state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return a site's entries after its used step; the same object for the whole step."""
        return self.model.shortened(weights, state, compared.factors) if compared.shortened else weights

    def _cosines(
        self,
        updates: Mapping[str, Mapping[str, Tensor]],
        steps: Mapping[str, Mapping[str, float]],
        state: Mapping[str, Tensor],
    ) -> dict[str, float]:
        """Return the cosine of each site's step with the mean of the others' directions.

        With the unit step u of a site and the sum s of all, it is (u·s - 1) / ‖s - u‖. Computed entry by
        entry, to save memory.
        """
        moved = {site: steps[site]["parameters"] for site in updates}
        dots, squared = dict.fromkeys(updates, 0.0), 0.0
        for key in sorted(self.model.parameters):
            start = state[key].double()

            def unit(site: str, key: str = key, start: Tensor = start) -> Tensor:
                return (updates[site][key].double() - start) / (moved[site] or 1.0)

            total = torch.zeros_like(start)
            for site in updates:
                total += unit(site)
            squared += float(total.square().sum())
            for site in updates:
                dots[site] += float((unit(site) * total).sum())
        cosines = {}
        for site, dot in dots.items():
            rest = squared - 2 * dot + 1  # of s - u, squared
            cosines[site] = (dot - 1) / math.sqrt(rest) if moved[site] and rest > 1e-9 else 0.0
        return cosines


def others_median(lengths: Mapping[str, float]) -> dict[str, float]:
    """Return for each site the upper median of the other sites' values.

    >>> others_median({"A": 1.0, "B": 2.0, "C": 90.0})
    {'A': 90.0, 'B': 90.0, 'C': 2.0}
    """
    return {
        site: statistics.median_high(length for other, length in lengths.items() if other != site)
        for site in lengths
    }


def suspicion(
    site: str,
    step: Mapping[str, float],
    scores: Mapping[str, float],
    earlier: Sequence[Mapping[str, float]],
    *,
    higher_is_better: bool,
) -> str | None:
    """Return the reason to look at a site, or ``None``.

    Example:
        >>> step = {"parameters": 1.0, "buffers": 1.0, "cosine": -0.6}
        >>> before, after = {"A": 0.6, "B": 0.5, "C": 0.7}, {"A": 0.2, "B": 0.9, "C": 0.1}
        >>> print(suspicion("B", step, after, [before], higher_is_better=True))
        a step 1 times as long as the others', cosine -0.6; their validation: 0.15, at best 0.65 before
        >>> suspicion("B", step, before, [after], higher_is_better=True)
    """
    longest = max(step[what] / most for what, most in _ALLOWED.items())
    if step["cosine"] >= _AGAINST and longest <= _FAR:
        return None
    step_text = f"a step {longest:g} times as long as the others', cosine {step['cosine']:g}"
    now = _others(site, scores)
    if now is None:
        return f"{step_text}; no validation of theirs shows the effect"
    before = [median for entry in earlier if (median := _others(site, entry)) is not None]
    best = (max if higher_is_better else min)(before, default=now)
    if not before or (now > best if higher_is_better else now < best):
        return None
    return f"{step_text}; their validation: {now:.2f}, at best {best:.2f} before"


def _others(site: str, scores: Mapping[str, float]) -> float | None:
    """Return the median of the other sites' scores; ``None`` below two, since one could decide alone."""
    others = [score for other, score in scores.items() if other != site]
    return statistics.median(others) if len(others) >= LEAST_SITES - 1 else None
