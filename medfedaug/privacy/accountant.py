"""Compute ε of Gaussian releases together, by Opacus' accountant of Rényi differential privacy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


class Spent(NamedTuple):
    """Releases with noise, all alike.

    Args:
        noise: the noise multiplier.
        releases: how many.
        rate: the probability with which a case takes part in each of them.
    """

    noise: float
    releases: int
    rate: float = 1.0


ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [2**k for k in range(6, 12)]
"""Orders of the Rényi divergence: those of Opacus, and larger ones for budgets below 1."""


def require_opacus() -> Any:
    """Opacus' accountants."""
    try:
        import opacus.accountants
        import opacus.accountants.utils
    except ImportError as error:
        raise ConfigError(
            "privacy: noise needs Opacus for its account; pip install 'medfedaug[privacy]'"
        ) from error
    return opacus.accountants


def epsilon_spent(releases: Iterable[tuple[float, int] | tuple[float, int, float]], delta: float) -> float:
    """ε of Gaussian releases together, by Opacus' accountant of Rényi differential privacy.

    Args:
        releases: noise multipliers, each with its number of releases and, if not every one uses all cases,
            the probability with which a case is in it (`Spent`).
        delta: δ.

    Returns:
        ε; infinite where a release has no noise, or too little for its square to be a number.

    Raises:
        ConfigError: without Opacus, and for a δ that is no probability below 1.
    """
    rdp = require_opacus().analysis.rdp
    if not 0 < delta < 1:
        raise ConfigError(f"privacy: delta must be above 0 and below 1, got {delta}")
    entered = [Spent(*release) for release in releases]
    if not all(one.noise > 0 and one.noise**2 > 0 for one in entered):
        return math.inf
    together = sum(one.releases * _divergence(one.noise, one.rate) for one in entered)
    if isinstance(together, int):  # no release
        return 0.0
    return float(rdp.get_privacy_spent(orders=ORDERS, rdp=together, delta=delta)[0])


@lru_cache(maxsize=2**10)
def _divergence(noise: float, rate: float) -> np.ndarray:
    """Rényi divergence of one release, at `ORDERS`; a ledger asks for the same ones before each release."""
    rdp = require_opacus().analysis.rdp
    found: np.ndarray = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)
    return found


def noise_multiplier_for(epsilon: float, delta: float, releases: int) -> float:
    """The smallest noise multiplier with which a number of releases spend at most ε together.

    Args:
        epsilon: ε.
        delta: δ.
        releases: their number: FedRDN has one per job, FedFA and FedFAʰ have one per round each.

    Raises:
        ConfigError: without Opacus, and for a budget that no noise keeps.
    """
    utils = require_opacus().utils
    try:
        return float(
            utils.get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=1.0,
                steps=releases,
                epsilon_tolerance=min(0.01, epsilon / 100),
                alphas=ORDERS,
            )
        )
    except ValueError as error:
        raise ConfigError(f"privacy: ε = {epsilon} with δ = {delta}: {error}") from error
