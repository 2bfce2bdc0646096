"""Directions of the sites' steps: a site whose steps go against the others' is named, and still counts."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# A rounded cosine up to it points against the others, as 1 of 728 honest steps does, and most steps of sites
# that go backwards or train with swapped labels, from the second round on.
_AGAINST = -0.2
_LEAST_ROUNDS = 3


def cosines(
    updates: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tensor], keys: Collection[str]
) -> dict[str, float]:
    """Return the cosine of each site's step with the mean of the others' directions; 0 without a step.

    With the unit step u of a site and the sum s of all, it is (u·s - 1) / ‖s - u‖. Computed entry by entry,
    to save memory, and rounded, since exact values depend on single images.
    """

    def step(site: str, key: str) -> Tensor:
        return updates[site][key].double() - state[key].double()

    lengths = {
        site: math.sqrt(sum(float(step(site, key).square().sum()) for key in keys)) for site in updates
    }
    dots, squared = dict.fromkeys(updates, 0.0), 0.0
    for key in keys:
        total = torch.zeros_like(state[key], dtype=torch.float64)
        for site, length in lengths.items():
            total += step(site, key) / (length or 1.0)
        squared += float(total.square().sum())
        for site, length in lengths.items():
            dots[site] += float((step(site, key) / (length or 1.0) * total).sum())
    found = {}
    for site, dot in dots.items():
        rest = squared - 2 * dot + 1  # of s - u, squared
        found[site] = round((dot - 1) / math.sqrt(rest), 1) if lengths[site] and rest > 1e-9 else 0.0
    return found


def suspects(rounds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the sites whose steps went against the others' in most rounds, each with the reason.

    Args:
        rounds: entries of ``results.json``.

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
