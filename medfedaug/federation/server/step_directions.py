"""Directions of the sites' steps: a site whose steps go against the others' is named, and still counts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from medfedaug.functional.means import blocks

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
