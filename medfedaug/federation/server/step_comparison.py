"""Compare the sites' steps of a round: shorten long steps, and name suspected sites.

Each site is compared with the other sites alone, so that a long step does not widen its own limit. With fewer
than half of the sites dishonest, the upper median of the others' lengths lies between the shortest and the
longest honest step. Of two sites nobody can tell which one is wrong.

A site with more samples takes more training steps, and the length of its update grows about with the root of
their number. Lengths are therefore divided by the root of the site's weight in the mean, which ``max_share``
limits: claimed samples lengthen a step no more than that.

A shortened step keeps its direction. Directions are compared with the mean of the others' directions, in
which every site counts alike. A site is suspected if its steps stand apart in most rounds, whether or not a
robust mean keeps them out of the model. That is a reason to look at the site, and no proof: its steps count.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medfedaug.federation.messages.site_sampling import LEAST_SITES
from medfedaug.federation.messages.tensor_checks import StateDictValidator
from medfedaug.functional.robust import clip_factor

# Multiples of the limit: running statistics of honest sites differ more than their parameters.
_ALLOWED = {"parameters": 1.0, "buffers": 2.0}
# A rounded cosine up to it points against the others, as 1 of 728 honest steps does, and most steps of sites
# that go backwards or train with swapped labels, from the second round on.
_AGAINST = -0.2
# Steps of a larger multiple stand apart. The largest of an honest site with 20 times the samples was 8.
_FAR = 10.0
_LEAST_ROUNDS = 3


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


def suspects(rounds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the sites whose steps stood apart in most rounds, each with the reason.

    Args:
        rounds: entries of ``results.json``.

    Example:
        >>> steps = {"A": {"cosine": 0.4, "parameters": 1.0}, "B": {"cosine": -0.3, "parameters": 1.0}}
        >>> suspects([{"steps": steps}] * 3)["B"].split(":")[0]
        "its steps went against the others' in 3 of 3 rounds"
    """
    found = {}
    compared = [entry["steps"] for entry in rounds if entry.get("steps")]
    for site in sorted({site for steps in compared for site in steps}):
        own = [steps[site] for steps in compared if site in steps]
        against = sum(step["cosine"] <= _AGAINST for step in own)
        far = sum(max(step.get(what, 0) / most for what, most in _ALLOWED.items()) > _FAR for step in own)
        count, what = max((against, "went against the others'"), (far, "were far longer than the others'"))
        if count >= max(_LEAST_ROUNDS, len(own) / 2):
            advice = "look at its images and labels (swapped classes?)"
            found[site] = f"its steps {what} in {count} of {len(own)} rounds: {advice}"
    return found
