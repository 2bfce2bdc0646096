"""Paired comparisons over seeds and over patients, without SciPy, a large dependency for four functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np

__all__ = [
    "PairedTest",
    "PatientTest",
    "bootstrap_interval",
    "compare_patients",
    "detectable_difference",
    "paired_t_test",
    "t_quantile",
    "t_two_sided",
    "wilcoxon_signed_rank",
]

# Above so many differences the exact distribution of Wilcoxon's statistic takes longer than it is worth.
_EXACT_RANKS = 300
_RESAMPLES = 10_000
_NORMAL = NormalDist()


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


def detectable_difference(spread: float, pairs: int, power: float = 0.8, level: float = 0.05) -> float:
    r"""The resolution of an experiment: the smallest true difference that a paired t-test would find.

    .. math:: d = \lambda s / \sqrt n, \qquad P(|T'_{n-1}(\lambda)| > t_{1 - \alpha / 2, n-1}) = 1 - \beta

    with T' Student's t with noncentrality λ.

    Args:
        spread: s, standard deviation of the paired differences.
        pairs: n, at least 2.
        power: 1 - β, how often the difference would be found.
        level: α, of the two-sided test.

    Returns:
        d, in the units of ``spread``.

    Raises:
        ValueError: for fewer than two pairs, or a power that does not lie between ``level`` and 1.

    Example:
        >>> round(detectable_difference(0.07, pairs=22), 3)
        0.044
    """
    if pairs < 2 or not level < power < 1:
        raise ValueError(f"need two or more pairs and a power above {level}, got {pairs} and {power}")
    df, critical = pairs - 1, t_quantile(1 - level, pairs - 1)
    low, high = 0.0, 1.0
    while _power(high, critical, df) < power:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _power(middle, critical, df) < power else (low, middle)
    return high * spread / math.sqrt(pairs)


def _power(noncentrality: float, critical: float, df: int) -> float:
    """P(|T'| > critical): the normal tail beyond critical * S, averaged over S = sqrt(chi2 / df)."""
    intervals, half_width = 400, 10 / math.sqrt(df)  # 14 standard deviations of S
    start, end = max(0.0, 1 - half_width), 1 + half_width
    scale = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    total = 0.0
    for k in range(intervals + 1):
        s = start + (end - start) * k / intervals
        if s == 0 and df > 1:
            continue
        density = math.exp(scale + ((df - 1) * math.log(s) if s else 0.0) - df * s * s / 2)
        beyond = _NORMAL.cdf(noncentrality - critical * s) + _NORMAL.cdf(-noncentrality - critical * s)
        total += (1 if k in (0, intervals) else 4 if k % 2 else 2) * density * beyond  # Simpson's rule
    return total * (end - start) / intervals / 3


def wilcoxon_signed_rank(differences: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test: whether differences are symmetric about zero.

    Args:
        differences: paired differences. Zeros are left out, as Wilcoxon did; equal sizes share a mean rank.

    Returns:
        Twice the smaller tail, at most 1: exact, from all assignments of signs to the ranks, for up to 300
        differences that are not zero; by the normal approximation, corrected for ties, beyond.

    Example:
        >>> wilcoxon_signed_rank([0.5, 1.0, 2.0, -0.1, 3.0, 1.5])
        0.0625
    """
    # Rounded, since 0.3 - 0.2 and 0.2 - 0.1 are one size and not two.
    known = np.round(np.asarray(differences, dtype=np.float64), 12)
    known = known[known != 0]
    n = len(known)
    if not n:
        return 1.0
    _, inverse, ties = np.unique(np.abs(known), return_inverse=True, return_counts=True)
    last = np.cumsum(ties)
    doubled = (2 * last - ties + 1)[inverse]  # twice the mean rank, a whole number
    positive, total = int(doubled[known > 0].sum()), int(doubled.sum())
    if n > _EXACT_RANKS:
        deviation = math.sqrt(float((doubled.astype(np.float64) ** 2).sum())) / 2
        distance = max(0.0, abs(positive - total / 2) - 1)  # half a rank, for continuity
        return min(1.0, 2 * _NORMAL.cdf(-distance / deviation))
    share = np.zeros(total + 1)
    share[0] = 1.0
    for rank in doubled.tolist():
        share[rank:] += share[: total + 1 - rank].copy()
        share /= 2
    return min(1.0, 2 * float(share[: min(positive, total - positive) + 1].sum()))


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap interval of a mean (BCa; Efron, JASA 1987).

    Args:
        values: independent values, for example one paired difference per patient.
        confidence: of the interval.
        seed: of the 10,000 resamples.

    Returns:
        The lower and the upper end.

    Raises:
        ValueError: for fewer than two values.

    Example:
        >>> low, high = bootstrap_interval([0.02, -0.01, 0.04, 0.03, 0.00, 0.05])
        >>> round(low, 2), round(high, 2)
        (0.0, 0.04)
    """
    sample = np.asarray(values, dtype=np.float64)
    n = len(sample)
    if n < 2:
        raise ValueError(f"need two or more values, got {n}")
    mean, centred = float(sample.mean()), sample - sample.mean()
    squares = float((centred**2).sum())
    if squares <= (1e-12 * max(1.0, float(np.abs(sample).max()))) ** 2:  # all equal, but for rounding
        return mean, mean
    rng = np.random.default_rng(seed)
    rows = max(1, 2**20 // n)  # indices of 8 MB at a time
    means = np.concatenate(
        [
            sample[rng.integers(0, n, (min(rows, _RESAMPLES - start), n))].mean(axis=1)
            for start in range(0, _RESAMPLES, rows)
        ]
    )
    # Ties with the mean itself count half, which matters for scores of few values.
    tolerance = 1e-12 * float(np.abs(centred).max())
    below = np.count_nonzero(means < mean - tolerance) + np.count_nonzero(abs(means - mean) <= tolerance) / 2
    bias = _NORMAL.inv_cdf(min(max(below / _RESAMPLES, 0.5 / _RESAMPLES), 1 - 0.5 / _RESAMPLES))
    acceleration = float((centred**3).sum()) / (6 * squares**1.5)  # of a mean, by its influence function
    ends = []
    for side in (-1, 1):
        z = bias + side * _NORMAL.inv_cdf((1 + confidence) / 2)
        ends.append(_NORMAL.cdf(bias + z / (1 - acceleration * z)))
    low, high = np.quantile(means, ends)
    return float(low), float(high)


@dataclass(frozen=True)
class PairedTest:
    """Result of a paired t-test.

    Attributes:
        difference: mean difference.
        low: lower end of its 95% confidence interval.
        high: upper end.
        p: two-sided p-value.
        pairs: number of pairs.
        detectable: the smallest true difference that would have been found four times in five, given how far
            the pairs lie apart (`detectable_difference`).
    """

    difference: float
    low: float
    high: float
    p: float
    pairs: int
    detectable: float


def paired_t_test(values: Sequence[float], baseline: Sequence[float]) -> PairedTest:
    """Test whether ``values`` differ from ``baseline`` pair by pair.

    Args:
        values: scores, for example one per seed.
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
    pairs, mean, spread = len(differences), fmean(differences), stdev(differences)
    if spread == 0:
        return PairedTest(mean, mean, mean, 0.0 if mean else 1.0, pairs, 0.0)
    error = spread / math.sqrt(pairs)
    half = t_quantile(0.95, pairs - 1) * error
    p = t_two_sided(mean / error, pairs - 1)
    return PairedTest(mean, mean - half, mean + half, p, pairs, detectable_difference(spread, pairs))


@dataclass(frozen=True)
class PatientTest:
    """Comparison of two methods on the same patients.

    Attributes:
        difference: mean difference over the patients.
        low: lower end of its 95% bootstrap interval, over resampled patients.
        high: upper end.
        p: two-sided p-value of Wilcoxon's signed-rank test.
        patients: number of patients.
        better: patients whose score is higher than the baseline's.
        worse: patients whose score is lower.
        detectable: the smallest true difference that so many patients, with differences that lie as far apart
            as these, would have shown four times in five (`detectable_difference`).
    """

    difference: float
    low: float
    high: float
    p: float
    patients: int
    better: int
    worse: int
    detectable: float


def compare_patients(values: Sequence[float], baseline: Sequence[float]) -> PatientTest:
    """Compare two methods patient by patient.

    Args:
        values: one score per patient.
        baseline: scores of the same patients.

    Raises:
        ValueError: for different lengths or fewer than two patients.

    Example:
        >>> test = compare_patients([0.7, 0.8, 0.6, 0.9], [0.6, 0.5, 0.4, 0.5])
        >>> round(test.difference, 3), test.better, test.p
        (0.25, 4, 0.125)
    """
    if len(values) != len(baseline) or len(values) < 2:
        raise ValueError(f"need two or more pairs, got {len(values)} values and {len(baseline)}")
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    low, high = bootstrap_interval(differences)
    return PatientTest(
        difference=fmean(differences),
        low=low,
        high=high,
        p=wilcoxon_signed_rank(differences),
        patients=len(differences),
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
        detectable=detectable_difference(stdev(differences), len(differences)),
    )
