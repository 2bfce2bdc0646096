"""Paired comparisons over seeds, intervals of means, and the end of a rise."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev, variance
from typing import Any, TypeVar

from medfedaug.metrics.base import Metric

K = TypeVar("K")
P = TypeVar("P", bound=Hashable)


def t_two_sided(t: float, df: float) -> float:
    """Return the probability that a Student's t variable is at least as far from zero as ``t``.

    Example:
        >>> round(t_two_sided(2.776, df=4), 4)
        0.05
    """
    from scipy.special import stdtr  # light commands import this module

    return float(2 * stdtr(df, -abs(t)))


def t_quantile(confidence: float, df: float) -> float:
    """Return the limit ``t`` such that Student's t lies in [``-t``, ``t``] with probability ``confidence``.

    Example:
        >>> round(t_quantile(0.95, df=4), 3)
        2.776
    """
    from scipy.special import stdtrit  # in a tenth of the time of scipy.stats

    return float(-stdtrit(df, (1 - confidence) / 2))


def mean_interval(
    values: Sequence[float],
    largest: float = math.inf,
    confidence: float = 0.95,
    patients: Sequence[Hashable] | None = None,
) -> tuple[float, float] | None:
    """Return the interval of a mean over patients by Student's t.

    ::

        x̄ ± tₘ₋₁ (1/n) √((m/(m − 1)) Σ_(p=1..m) (Σ_(i∈p) (xᵢ − x̄))²),   within [0, largest]

    It is the linearised error of a mean over clusters (Cochran, Sampling Techniques, 1977, Section 9A). With
    one value of each patient it is the usual ``x̄ ± tₙ₋₁ s / √n``.

    Args:
        values: n scores.
        largest: the largest possible score; the smallest is 0.
        confidence: confidence of the interval.
        patients: the patient of each score, m different ones; by default each score has another one.

    Returns:
        The ends; ``None`` for fewer than two patients.

    Example:
        >>> [round(end, 3) for end in mean_interval([0.5, 0.6, 0.7])]
        [0.352, 0.848]
        >>> [round(end, 3) for end in mean_interval([0.5, 0.5, 0.6, 0.6, 0.7, 0.7], patients="aabbcc")]
        [0.352, 0.848]
    """
    sums: dict[Hashable, float] = {}
    mean = fmean(values) if values else 0.0
    for patient, value in zip(range(len(values)) if patients is None else patients, values, strict=True):
        sums[patient] = sums.get(patient, 0.0) + value - mean
    if len(sums) < 2:
        return None
    spread = math.fsum(total**2 for total in sums.values()) * len(sums) / (len(sums) - 1)
    half = t_quantile(confidence, len(sums) - 1) * math.sqrt(spread) / len(values)
    return max(0.0, mean - half), min(largest, mean + half)


def interval_ends(metric: Metric, values: Sequence[tuple[float, Hashable]]) -> dict[str, float]:
    """Return ``NAME_low`` and ``NAME_high``, the 95% interval of a metric's mean, from values and patients.

    For fewer than two patients the result is empty.
    """
    scores, patients = [score for score, _ in values], [patient for _, patient in values]
    ends = mean_interval(scores, metric.largest, patients=patients)
    return {} if ends is None else {f"{metric.name}_low": ends[0], f"{metric.name}_high": ends[1]}


def detectable_difference(spread: float, pairs: int, power: float = 0.8, level: float = 0.05) -> float:
    """Return the resolution of an experiment: the smallest true difference that a paired t-test detects.

    ::

        d = λ s / √n,   P(|T′ₙ₋₁(λ)| > t_(1−α/2, n−1)) = 1 − β

    with T' Student's t with noncentrality λ.

    Args:
        spread: s, standard deviation of the paired differences.
        pairs: n, at least 2.
        power: 1 - β, the probability of finding the difference.
        level: α, the level of the two-sided test.

    Returns:
        d, in the units of ``spread``.

    Example:
        >>> round(detectable_difference(0.07, pairs=22), 3)
        0.044
    """
    df, critical = pairs - 1, t_quantile(1 - level, pairs - 1)
    from scipy.optimize import brentq

    high = 1.0
    while _power(high, critical, df) < power:
        high *= 2
    root = brentq(lambda noncentrality: _power(noncentrality, critical, df) - power, 0.0, high, xtol=1e-13)
    return float(root) * spread / math.sqrt(pairs)


def _power(noncentrality: float, critical: float, df: int) -> float:
    """P(|T'| > critical): the square of T' has a noncentral F distribution."""
    from scipy.stats import ncf

    if noncentrality == 0:
        return t_two_sided(critical, df)
    return float(ncf.sf(critical**2, 1, df, noncentrality**2))


@dataclass(frozen=True)
class PairedTest:
    """Result of a paired t-test.

    Attributes:
        difference: mean difference.
        low: lower end of its 95% confidence interval.
        high: upper end.
        p: two-sided p-value.
        detectable: the smallest true difference that the test detects with probability 0.8, for the spread of
            the pairs (`detectable_difference`).
    """

    difference: float
    low: float
    high: float
    p: float
    pairs: int
    detectable: float


def paired_t_test(values: Sequence[float], baseline: Sequence[float]) -> PairedTest:
    """Test whether ``values`` and ``baseline`` differ, pair by pair.

    Args:
        values: scores, for example one per seed; two or more.
        baseline: scores of the same seeds.

    Example:
        >>> round(paired_t_test([0.71, 0.74, 0.72], [0.70, 0.71, 0.70]).p, 3)
        0.074
    """
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    pairs, mean, spread = len(differences), fmean(differences), stdev(differences)
    if spread == 0:
        return PairedTest(mean, mean, mean, 0.0 if mean else 1.0, pairs, 0.0)
    error = spread / math.sqrt(pairs)
    half = t_quantile(0.95, pairs - 1) * error
    p = t_two_sided(mean / error, pairs - 1)
    return PairedTest(mean, mean - half, mean + half, p, pairs, detectable_difference(spread, pairs))


def paired_by_patient(
    values: Mapping[str, float], baseline: Mapping[str, float], patients: Mapping[str, P]
) -> list[float]:
    """Return each patient's difference of two models, over their common cases by name.

    A case without a known patient counts as one.
    """
    pairs = {case: (values[case], baseline[case]) for case in sorted(values.keys() & baseline.keys())}
    means: Mapping[Any, tuple[float, float]] = patient_means(pairs, lambda case: patients.get(case, case))
    return [a - b for a, b in means.values()]


def difference(differences: Sequence[float], unit: str = "cases") -> dict[str, Any]:
    """Return the comparison of two models on a site's patients, as JSON types.

    The interval is Student's: the ends of a randomisation test are means over a few patients each.

    Args:
        differences: of each patient's scores, or of each case's where no patient is named.
        unit: ``"patients"`` or ``"cases"``.

    Returns:
        ``difference``, ``low`` and ``high``, the ends of its 95% interval, ``p``, and the number of patients
        by ``unit``; empty for fewer than two.
    """
    if len(differences) < 2:
        return {}
    test = paired_t_test(differences, [0.0] * len(differences))
    ends = {"low": test.low, "high": test.high, "p": test.p}
    return {unit: test.pairs, "difference": test.difference, **ends}


def patient_means(
    pairs: Mapping[K, tuple[float, float]], patient: Callable[[K], P]
) -> dict[P, tuple[float, float]]:
    """Return a pair of scores of each patient: the means over the patient's cases.

    Args:
        pairs: a score and the baseline's score by case.
        patient: returns the patient of a case.

    Returns:
        The pairs by patient, in the order of the patients' first cases.

    Example:
        >>> patient_means({"a1": (0.5, 0.25), "a2": (1.0, 0.75), "b1": (0.5, 0.5)}, lambda case: case[0])
        {'a': (0.75, 0.5), 'b': (0.5, 0.5)}
    """
    by_patient: dict[P, list[tuple[float, float]]] = {}
    for case, pair in pairs.items():
        by_patient.setdefault(patient(case), []).append(pair)
    return {
        key: (fmean(a for a, _ in scores), fmean(b for _, b in scores)) for key, scores in by_patient.items()
    }


_STEP = 0.01


def is_converged(validation: Sequence[float | None]) -> bool:
    """Return whether the score rose by at most 0.01 from the middle third of the rounds to the last.

    Medians of the thirds are compared, so that no single round decides. Higher scores are better; fewer than
    three rounds do not converge.

    Example:
        >>> is_converged([0.3, 0.5, 0.6, 0.6, 0.6, 0.6])
        True
        >>> is_converged([0.1, 0.1, 0.2, 0.3, 0.9, 0.4, 0.5, 0.6, 0.6])
        False
    """
    scores = [score or 0.0 for score in validation]
    third = len(scores) // 3
    if not third:
        return False
    return median(scores[-third:]) <= median(scores[-2 * third : -third]) + _STEP


def has_stalled(validation: Sequence[float], patience: int, *, higher_is_better: bool = True) -> bool:
    """Return whether the last scores are no better than as many before, beyond the noise between rounds.

    The mean gain g of the last n scores over the n before counts if it exceeds
    ``t_(0.95, 2n−2) √((s₁² + s₂²) / n)``, the one-sided 95% limit of Student's two-sample test; the patience
    n is at least 2.

    Example:
        >>> has_stalled([0.3, 0.31, 0.5, 0.51], 2), has_stalled([0.6, 0.7, 0.6, 0.7], 2)
        (False, True)
    """
    if len(validation) < 2 * patience:
        return False
    before, last = validation[-2 * patience : -patience], validation[-patience:]
    gain = (fmean(last) - fmean(before)) * (1 if higher_is_better else -1)
    error = math.sqrt((variance(before) + variance(last)) / patience)
    return gain <= t_quantile(0.9, 2 * patience - 2) * error
