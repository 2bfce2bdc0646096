"""Compute the total ε of Gaussian releases, by Opacus' accountant of Rényi differential privacy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


class Spent(NamedTuple):
    """Equal releases with noise; ``rate`` is the probability of a case to take part in each of them."""

    noise: float
    releases: int
    rate: float = 1.0


ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [2**k for k in range(6, 12)]
"""Orders of the Rényi divergence: Opacus' orders, and larger ones for budgets below 1."""


def require_opacus() -> Any:
    """Import Opacus' accountants."""
    try:
        import opacus.accountants
    except ImportError as error:
        text = "privacy: noise needs Opacus for its account; pip install 'medfedaug[privacy]'"
        raise ConfigError(text) from error
    return opacus.accountants


def epsilon_spent(releases: Iterable[tuple[float, int] | tuple[float, int, float]], delta: float) -> float:
    """Return the total ε of Gaussian releases, by Opacus' accountant of Rényi differential privacy.

    Each entry is a noise multiplier with its number of releases and, if these do not use all cases, the
    probability of a case to be in each (`Spent`).

    Returns:
        ε; infinite where a release has no noise, or so little that its square is 0.
    """
    rdp = require_opacus().analysis.rdp
    spent = [Spent(*release) for release in releases]
    if not all(group.noise > 0 and group.noise**2 > 0 for group in spent):
        return math.inf
    divergence = sum(group.releases * _divergence(group.noise, group.rate) for group in spent)
    if isinstance(divergence, int):  # no release
        return 0.0
    return float(rdp.get_privacy_spent(orders=ORDERS, rdp=divergence, delta=delta)[0])


@lru_cache(maxsize=2**10)
def _divergence(noise: float, rate: float) -> np.ndarray:
    """Return the Rényi divergence of one release, at `ORDERS`; a ledger repeats the same calls."""
    rdp = require_opacus().analysis.rdp
    divergence: np.ndarray = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)
    return divergence
