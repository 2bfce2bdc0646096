"""Find sites whose values lie far outside those of the others, by limits from the sites themselves.

A method says of what kind its exchanged values are (`ServerExchange.kinds`), and each kind has a factor. A
site is refused where the largest magnitude of an entry is more than that many times the median of all sites'
(for kinds that are divided by, also where the smallest is that many times less). As long as fewer than half
of the sites lie, the median is between values of honest ones, so that a liar is refused and nobody else is.

The same holds of the length of their steps (`judge_steps`): the global model is no measure of what is usual,
since one site may have moved it in the round before.

Of two sites nobody can say which one is wrong, and nothing is refused. Of three, one may lie; two that lie
alike are the majority. What lies within the factor is never recognised.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from medfedaug.errors import UpdateRefused
from medfedaug.federation.messages.site_sampling import LEAST_SITES
from medfedaug.methods.base import (
    FEATURE_MEAN,
    FEATURE_STD,
    INTENSITY_MEAN,
    INTENSITY_STD,
    STEPS,
    VARIANCE,
    WEIGHTS,
    Payload,
    ServerExchange,
)

# Far from what sites differ by: intensities as stored have other units at every scanner, the numbers of steps
# follow the sites' sizes, and a running average of few batches is still near its start.
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
# A median below it counts as this: where most sites have almost nothing, a little more is not suspicious.
_LEAST = {INTENSITY_MEAN: 1e-3, FEATURE_MEAN: 0.1, FEATURE_STD: 0.1, VARIANCE: 0.1, WEIGHTS: 0.1}

# Times the median length of the sites' steps. Honest ones were 1 to 2 times as long where sites have about as
# many samples as each other, running statistics of unscaled images 7 times; 32 with 40 times the samples.
_LONGEST = {"parameters": 25.0, "buffers": 100.0}
# Times the norm that the model began with: nowhere too far. Where most sites hardly move, training of a few
# images that became unstable went 50 times as far, and half to once this norm.
_NEVER_TOO_FAR = 2.0

Sizes = dict[str, tuple[float, float]]
"""By entry, the largest magnitude and the smallest that is not 0."""


def check_payload(site: str, method: str, exchange: ServerExchange, payload: Payload) -> None:
    """The method's own check of one payload."""
    try:
        exchange.check(payload)
    except ValueError as error:
        raise UpdateRefused(site, method, expected="usable statistics", got=str(error)) from error


class Plausibility:
    """Compares what sites send for the same request.

    Attributes:
        kinds: the kind of every entry that is compared, by ``<method>/<key>``.
    """

    def __init__(self, exchanges: Mapping[str, ServerExchange]) -> None:
        self.kinds = {
            f"{name}/{key}": kind
            for name, exchange in exchanges.items()
            for key, kind in exchange.kinds.items()
            if kind in _FACTORS
        }

    def sizes(self, payload: Payload) -> Sizes:
        """Return the sizes of a checked payload that are compared."""
        return {key: _sizes(payload[key]) for key in sorted(self.kinds)}

    def judge(self, sites: Mapping[str, Sizes]) -> dict[str, UpdateRefused]:
        """The sites of which an entry is far outside, each with the first such entry."""
        if len(sites) < LEAST_SITES:
            return {}
        found: dict[str, UpdateRefused] = {}
        for key, kind in sorted(self.kinds.items()):
            factor, least = _FACTORS[kind], _LEAST.get(kind, 0.0)
            largest = factor * max(statistics.median_low(entry[key][0] for entry in sites.values()), least)
            smallest = statistics.median_high(entry[key][1] for entry in sites.values()) / factor
            median = f"the median of {len(sites)} sites"
            for site, entry in sorted(sites.items()):
                high, low = entry[key]
                if high > largest > 0:
                    reason = UpdateRefused(
                        site,
                        key,
                        expected=f"values up to {largest:.4g}, {factor:g} times {median}",
                        got=f"{high:.4g}",
                    )
                elif kind in _DIVIDED_BY and 0 < low < smallest:
                    reason = UpdateRefused(
                        site,
                        key,
                        expected=f"values from {smallest:.4g} on, a {factor:g}th of {median}",
                        got=f"{low:.4g}",
                    )
                else:
                    continue
                found.setdefault(site, reason)
        return found


def judge_steps(steps: Mapping[str, Mapping[str, float]], norm: float) -> dict[str, UpdateRefused]:
    """The sites whose step is far longer than those of the others in the same round."""
    if len(steps) < LEAST_SITES:
        return {}
    found: dict[str, UpdateRefused] = {}
    for what, factor in _LONGEST.items():
        median = statistics.median_low(moved[what] for moved in steps.values())
        allowed = max(factor * median, _NEVER_TOO_FAR * norm)
        usual = f"the median of {len(steps)} sites is {median:.4g}"
        expected = f"a step of norm up to {allowed:.4g}, where {usual}"
        for site, moved in sorted(steps.items()):
            if moved[what] > allowed:
                error = UpdateRefused(site, what, expected=expected, got=f"{moved[what]:.4g}")
                found.setdefault(site, error)
    return found


def _sizes(value: Tensor) -> tuple[float, float]:
    magnitudes = value.detach().double().abs()
    above = magnitudes[magnitudes > 0]
    return (float(torch.max(above)), float(torch.min(above))) if above.numel() else (0.0, 0.0)
