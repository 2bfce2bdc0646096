"""Student's t and the paired t-test, in closed form: scipy would be a large dependency for one number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

__all__ = ["PairedTest", "paired_t_test", "t_quantile", "t_two_sided"]


def t_two_sided(t: float, df: int) -> float:
    r"""Probability that a Student's t variable is at least as far from zero as ``t``.

    The finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4), with
    :math:`\theta = \arctan(|t| / \sqrt{\nu})`.

    Args:
        t: the statistic; infinite values are allowed.
        df: degrees of freedom, at least 1.

    Raises:
        ValueError: for fewer than one degree of freedom.

    Example:
        >>> round(t_two_sided(2.776, df=4), 4)
        0.05
    """
    if df < 1:
        raise ValueError(f"df must be at least 1, got {df}")
    theta = math.atan2(abs(t), math.sqrt(df))
    cosine = math.cos(theta)
    term = cosine if df % 2 else 1.0
    total = 0.0 if df == 1 else term
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    inside = math.sin(theta) * total
    if df % 2:
        inside = 2 / math.pi * (theta + inside)
    return min(1.0, max(0.0, 1 - inside))


def t_quantile(confidence: float, df: int) -> float:
    """The ``t`` with ``confidence`` of a Student's t variable between ``-t`` and ``t``.

    Example:
        >>> round(t_quantile(0.95, df=4), 3)
        2.776
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > 1 - confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, df) > 1 - confidence else (low, middle)
    return high


@dataclass(frozen=True)
class PairedTest:
    """Result of a paired t-test.

    Attributes:
        difference: mean difference.
        low: lower end of its 95% confidence interval.
        high: upper end. Half the interval is about the smallest difference that could have been seen.
        p: two-sided p-value.
        pairs: number of pairs.
    """

    difference: float
    low: float
    high: float
    p: float
    pairs: int


def paired_t_test(values: Sequence[float], baseline: Sequence[float]) -> PairedTest:
    """Test whether ``values`` differ from ``baseline`` pair by pair.

    Args:
        values: scores, for example one a seed.
        baseline: scores of the same seeds.

    Raises:
        ValueError: for different lengths or fewer than two pairs.

    Example:
        >>> round(paired_t_test([0.71, 0.74, 0.72], [0.70, 0.71, 0.70]).p, 3)
        0.074
    """
    if len(values) != len(baseline) or len(values) < 2:
        raise ValueError(f"need two or more pairs, got {len(values)} values and {len(baseline)}")
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return PairedTest(mean, mean, mean, 0.0 if mean else 1.0, len(differences))
    half = t_quantile(0.95, len(differences) - 1) * error
    p = t_two_sided(mean / error, len(differences) - 1)
    return PairedTest(mean, mean - half, mean + half, p, len(differences))
