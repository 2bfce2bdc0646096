"""Compare the sites' steps of a round: shorten those that are too long, and name sites that stand apart.

Each site is measured by the other sites alone, so that a long step does not widen its own limit. As long as
fewer than half of the sites lie, the upper median of the others' lengths is no longer than the longest honest
step, and no shorter than the shortest. Of two sites nobody can say which one is wrong.

A site with more samples takes more training steps, and its update is longer about with their root. Lengths
are therefore divided by the root of the site's weight in the mean, which ``max_share`` has limited: samples
that a site claims lengthen its step no more than that.

A shortened step keeps its direction. Directions are compared with the mean of the others' directions, in
which every site counts alike however far it went. A site is suspected where its step stands apart and the
others' validation is no better after it. That is a reason to look at the site, and no proof: its step counts.
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

# Running statistics of honest sites differ more than their parameters do: the limit is so many times as long.
_ALLOWED = {"parameters": 1.0, "buffers": 2.0}
# A cosine below it goes against the others. Of honest ones about 1 of 800 was; of sites that went backwards,
# or trained with exchanged labels, nearly all were from the second round on.
_AGAINST = -0.25
# Steps of more times the others' stand apart. The largest of one honest site with 20 times the samples was 8.
_FAR = 10.0


@dataclass(frozen=True)
class ComparedStep:
    """A site's step in a round, measured by the other sites' steps.

    Args:
        times: by what moved, its length for its weight, in multiples of the others' median; 0 where the
            others did not move.
        factors: by what moved, the factor of the step that is used, 1 for all of it.
        cosine: with the mean of the others' directions, of the parameters.
    """

    times: Mapping[str, float]
    factors: Mapping[str, float]
    cosine: float

    @property
    def shortened(self) -> bool:
        """Return whether a part of the step is used."""
        return min(self.factors.values()) < 1

    def to_results(self) -> dict[str, float]:
        """Return the numbers of ``results.json``: rounded, since exact ones follow from single images."""
        lengths = {what: float(round(times)) for what, times in self.times.items()}
        return {**lengths, "cosine": round(self.cosine, 1)}


class StepComparison:
    """Limits the sites' steps by those of the other sites.

    Args:
        model: measures steps, and shortens them.
        limit: the longest step of the parameters for a site's weight, in multiples of the others' median.
    """

    def __init__(self, model: StateDictValidator, limit: float) -> None:
        self.model, self.limit = model, limit

    def compare(
        self,
        updates: Mapping[str, Mapping[str, Tensor]],
        steps: Mapping[str, Mapping[str, float]],
        weights: Mapping[str, float],
        state: Mapping[str, Tensor],
    ) -> dict[str, ComparedStep]:
        """Compare the steps of a round; nothing where there are too few."""
        if len(updates) < LEAST_SITES:
            return {}
        lengths = {w: {site: steps[site][w] / math.sqrt(weights[site]) for site in updates} for w in _ALLOWED}
        usual = {what: others_median(by_site) for what, by_site in lengths.items()}
        cosines = self._cosines(updates, steps, state)
        found = {}
        for site in updates:
            times = {what: _times(lengths[what][site], usual[what][site]) for what in _ALLOWED}
            factors = {what: clip_factor(times[what], self.limit * most) for what, most in _ALLOWED.items()}
            found[site] = ComparedStep(times, factors, cosines[site])
        return found

    def used(
        self, weights: dict[str, Tensor], compared: ComparedStep, state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return a site's entries after its step as it is used; the same object where all of it is."""
        return self.model.shortened(weights, state, compared.factors) if compared.shortened else weights

    def _cosines(
        self,
        updates: Mapping[str, Mapping[str, Tensor]],
        steps: Mapping[str, Mapping[str, float]],
        state: Mapping[str, Tensor],
    ) -> dict[str, float]:
        """Return the cosine of each site's step with the mean of the others' directions.

        With the unit step u of a site and the sum s of all, it is (u·s - 1) / ‖s - u‖. Entry by entry:
        beside the updates, memory is needed for a few of one entry, however many sites there are.
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
        found = {}
        for site, dot in dots.items():
            rest = squared - 2 * dot + 1  # of s - u, squared
            found[site] = (dot - 1) / math.sqrt(rest) if moved[site] and rest > 1e-9 else 0.0
        return found


def others_median(lengths: Mapping[str, float]) -> dict[str, float]:
    """Return the upper median of the other sites' values, for each of two sites or more.

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
    """Return the reason to look at a site, or ``None`` where there is none.

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
    told = f"a step {longest:g} times as long as the others', cosine {step['cosine']:g}"
    now = _others(site, scores)
    if now is None:
        return f"{told}; no validation of theirs shows the effect"
    before = [median for one in earlier if (median := _others(site, one)) is not None]
    best = (max if higher_is_better else min)(before, default=now)
    improved = now > best if higher_is_better else now < best
    return (
        None if improved or not before else f"{told}; their validation: {now:.2f}, at best {best:.2f} before"
    )


def _others(site: str, scores: Mapping[str, float]) -> float | None:
    """The median of the other sites' scores; ``None`` below two, since one could decide alone."""
    others = [score for other, score in scores.items() if other != site]
    return statistics.median(others) if len(others) >= LEAST_SITES - 1 else None


def _times(length: float, median: float) -> float:
    return length / median if median else 0.0
