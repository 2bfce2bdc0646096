"""Refuse sites whose values lie far outside those of the others, by limits from the sites themselves.

A method declares the kinds of its exchanged values (`ServerExchange.kinds`), and each kind has a factor. The
server refuses a site if the largest magnitude of an entry exceeds the median of all sites by this factor.
Values that serve as divisors are also refused below the median by this factor. With fewer than half of the
sites dishonest, the median lies between honest values.

`judge_steps` does the same for the lengths of steps. The global model is not a reference for them, since one
site may have moved it in the round before.

Of two sites nobody can tell which one is wrong, so nothing is refused. Of three, one may be dishonest; two
alike are the majority. Values within the factor pass.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from medfedaug.config.kinds import (
    FEATURE_MEAN,
    FEATURE_STD,
    INTENSITY_MEAN,
    INTENSITY_STD,
    STEPS,
    VARIANCE,
    WEIGHTS,
)
from medfedaug.errors import UpdateRefused
from medfedaug.federation.messages.participation import LEAST_SITES
from medfedaug.functional.means import blocks
from medfedaug.methods.base import Payload, ServerExchange

# Far above real differences between sites: stored intensities have other units at every scanner, numbers of
# steps follow the sites' sizes, and a running average of few batches is still near its start.
_FACTORS = {
    INTENSITY_MEAN: 1e3,
    INTENSITY_STD: 1e3,
    FEATURE_MEAN: 100.0,
    FEATURE_STD: 100.0,
    VARIANCE: 1e4,
    WEIGHTS: 100.0,
    STEPS: 1e3,
}
_DIVIDED_BY = (INTENSITY_STD, STEPS)
# Lower bounds of medians: if most sites have almost nothing, a little more is not suspicious.
_LEAST = {INTENSITY_MEAN: 1e-3, FEATURE_MEAN: 0.1, FEATURE_STD: 0.1, VARIANCE: 0.1, WEIGHTS: 0.1}

# Multiples of the median length of the sites' steps. Honest steps were 1 to 2 times as long with similar
# numbers of samples, running statistics of unscaled images 7 times; 32 with 40 times the samples.
_LONGEST = {"parameters": 25.0, "buffers": 100.0}
# Multiple of the model's initial norm that always passes. If most sites hardly move, unstable training on a
# few images went 50 times as far, which was half to once this norm.
_NEVER_TOO_FAR = 2.0

Sizes = dict[str, tuple[float, float]]  # by entry, the largest magnitude and the smallest nonzero one


def check_payload(site: str, method: str, exchange: ServerExchange, payload: Payload) -> None:
    """Run the method's own check of one payload."""
    try:
        exchange.check(payload)
    except ValueError as error:
        raise UpdateRefused(site, method, expected="usable statistics", got=str(error)) from error


class Plausibility:
    """Compares the sites' payloads for the same request.

    Attributes:
        kinds: the kind of every compared entry, by ``<method>/<key>``.
    """

    def __init__(self, exchanges: Mapping[str, ServerExchange]) -> None:
        self.kinds = {
            f"{name}/{key}": kind
            for name, exchange in exchanges.items()
            for key, kind in exchange.kinds.items()
            if kind in _FACTORS
        }

    def sizes(self, payload: Payload) -> Sizes:
        """Return the compared sizes of a checked payload."""
        return {key: _sizes(payload[key]) for key in sorted(self.kinds)}

    def judge(self, sites: Mapping[str, Sizes]) -> dict[str, UpdateRefused]:
        """Return the sites with outliers, each with the error for its first one."""
        if len(sites) < LEAST_SITES:
            return {}
        refused: dict[str, UpdateRefused] = {}
        for key, kind in sorted(self.kinds.items()):
            factor, least = _FACTORS[kind], _LEAST.get(kind, 0.0)
            largest = factor * max(statistics.median_low(entry[key][0] for entry in sites.values()), least)
            smallest = statistics.median_high(entry[key][1] for entry in sites.values()) / factor
            median = f"the median of {len(sites)} sites"
            for site, entry in sorted(sites.items()):
                high, low = entry[key]
                if high > largest > 0:
                    expected, got = f"values up to {largest:.4g}, {factor:g} times {median}", high
                elif kind in _DIVIDED_BY and 0 < low < smallest:
                    expected, got = f"values from {smallest:.4g} on, a {factor:g}th of {median}", low
                else:
                    continue
                refused.setdefault(site, UpdateRefused(site, key, expected=expected, got=f"{got:.4g}"))
        return refused


def judge_steps(steps: Mapping[str, Mapping[str, float]], norm: float) -> dict[str, UpdateRefused]:
    """Return the sites with a far longer step than the others in the same round."""
    if len(steps) < LEAST_SITES:
        return {}
    refused: dict[str, UpdateRefused] = {}
    for what, factor in _LONGEST.items():
        median = statistics.median_low(moved[what] for moved in steps.values())
        allowed = max(factor * median, _NEVER_TOO_FAR * norm)
        usual = f"the median of {len(steps)} sites is {median:.4g}"
        expected = f"a step of norm up to {allowed:.4g}, where {usual}"
        for site, moved in sorted(steps.items()):
            if moved[what] > allowed:
                error = UpdateRefused(site, what, expected=expected, got=f"{moved[what]:.4g}")
                refused.setdefault(site, error)
    return refused


def _sizes(value: Tensor) -> tuple[float, float]:
    magnitudes = value.detach().double().abs()
    nonzero = magnitudes[magnitudes > 0]
    return (float(nonzero.max()), float(nonzero.min())) if nonzero.numel() else (0.0, 0.0)


# A rounded cosine up to it points against the others, as 1 of 728 honest steps does, and most steps of sites
# that go backwards or train with swapped labels, from the second round on.
_AGAINST = -0.2
_LEAST_ROUNDS = 3


def cosines(
    updates: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tensor], keys: Collection[str]
) -> dict[str, float]:
    """Return the cosine of each site's step with the sum of the others' directions; 0 without a step.

    With the cosines c of all pairs of steps, it is for site i ::

        (Σ_(j≠i) cᵢⱼ) / √(Σ_(j≠i) Σ_(k≠i) cⱼₖ)

    rounded to a tenth, since exact values depend on single images.
    """
    products = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for key in keys:
        ends = (entries[key].flatten() for entries in updates.values())
        for start, *parts in blocks(state[key].flatten(), *ends):
            steps = torch.stack([part.float() for part in parts]).sub_(start)
            products += (steps @ steps.T).to(products)
    lengths = products.diagonal().sqrt()
    pairs = products / (lengths[:, None] * lengths).clamp_min(1e-300)
    sums, own = pairs.sum(dim=1), pairs.diagonal()
    others = (pairs.sum() - 2 * sums + own).clamp_min(1e-9).sqrt()
    return {
        site: round(value, 1) for site, value in zip(updates, ((sums - own) / others).tolist(), strict=True)
    }


def suspects(rounds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the sites whose steps went against the others' in most rounds, each with the reason.

    Example:
        >>> suspects([{"cosines": {"A": 0.4, "B": -0.3}}] * 3)["B"].split(":")[0]
        "its steps went against the others' in 3 of 3 rounds"
    """
    compared, found = [entry.get("cosines", {}) for entry in rounds], {}
    for site in sorted({site for cosine in compared for site in cosine}):
        own = [cosine[site] for cosine in compared if site in cosine]
        count = sum(value <= _AGAINST for value in own)
        if count >= max(_LEAST_ROUNDS, len(own) / 2):
            advice = "look at its images and labels (swapped classes?)"
            found[site] = f"its steps went against the others' in {count} of {len(own)} rounds: {advice}"
    return found
