"""Comparisons over seeds and patients, intervals of means, and the end of a rise."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev, variance
from typing import Any, TypeVar

from medfedaug.metrics.base import Metric

K = TypeVar("K")
P = TypeVar("P", bound=Hashable)

GAIN_CONFIDENCE = 0.9
"""Of the intervals; in simulations of two seeds and few patients they cover 88 to 97%."""

_STEP = 0.01  # of a rise


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
    patients: Sequence[Hashable] | None = None,
) -> tuple[float, float] | None:
    """Return the 95% interval of a mean over patients by Student's t.

    ::

        x̄ ± tₘ₋₁ (1/n) √((m/(m − 1)) Σ_(p=1..m) (Σ_(i∈p) (xᵢ − x̄))²),   within [0, largest]

    It is the linearised error of a mean over clusters (Cochran, Sampling Techniques, 1977, Section 9A). With
    one value of each patient it is the usual ``x̄ ± tₙ₋₁ s / √n``.

    Args:
        values: n scores.
        largest: the largest possible score; the smallest is 0.
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
    half = t_quantile(0.95, len(sums) - 1) * math.sqrt(spread) / len(values)
    return max(0.0, mean - half), min(largest, mean + half)


def interval_ends(metric: Metric, values: Sequence[tuple[float, Hashable]]) -> dict[str, float]:
    """Return ``NAME_low`` and ``NAME_high``, the 95% interval of a metric's mean, from values and patients.

    For fewer than two patients the result is empty.
    """
    scores, patients = [score for score, _ in values], [patient for _, patient in values]
    ends = mean_interval(scores, metric.largest, patients=patients)
    return {} if ends is None else {f"{metric.name}_low": ends[0], f"{metric.name}_high": ends[1]}


def detectable_difference(spread: float, pairs: int, power: float = 0.8) -> float:
    """Return the resolution of an experiment: the smallest true difference that a paired t-test detects.

    ::

        d = λ s / √n,   P(|T′ₙ₋₁(λ)| > t_(1−α/2, n−1)) = 1 − β

    with T' Student's t with noncentrality λ, and the two-sided level α = 0.05.

    Args:
        spread: s, standard deviation of the paired differences.
        pairs: n, at least 2.
        power: 1 - β, the probability of finding the difference.

    Returns:
        d, in the units of ``spread``.

    Example:
        >>> round(detectable_difference(0.07, pairs=22), 3)
        0.044
    """
    df, critical = pairs - 1, t_quantile(0.95, pairs - 1)
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
    """Test whether two or more ``values``, for example one per seed, differ from a baseline, pair by pair.

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
    """Return a score and the baseline's of each patient, means over the cases, in the order of first cases.

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


@dataclass(frozen=True)
class Difference:
    """Difference of a method and the reference at one site, in one training of each.

    Attributes:
        mean: mean over the site's patients.
        error: its standard error over the patients; ``None`` if the site has one patient or withholds it.
        patients: the number of patients.
    """

    mean: float
    error: float | None = None
    patients: int = 1


@dataclass(frozen=True)
class Gain:
    """Gain of a method over the reference, with its 90% interval if it has one."""

    mean: float
    low: float | None = None
    high: float | None = None


BySite = Mapping[str, Difference]
"""The differences of one training, by site."""


def mean_gain(trainings: Sequence[BySite], others: Sequence[Sequence[BySite]] = ()) -> Gain:
    """Return the mean gain over seeds and sites, each site with the same weight, and its 90% interval.

    With the gain ``gₛ`` of each of S seeds, the standard error ``eₖ`` over the patients of site k of K, and
    M methods that were trained with the same seeds and the same trainings of the reference, ::

        s_b² = Σₖ eₖ² / K²,   sₐ² = the mean over the methods of the variance of gₛ over the seeds.

    Two seeds say little about one method, hence all methods share sₐ². They also share the reference's
    trainings, so that sₐ² has about ``4M / (M + 3)`` (S − 1) degrees of freedom. The trainings of all seeds
    have the same patients, hence s_b² is not divided by S. Both variances have their own limit of Student's t
    (Cochran, Biometrics, 1964), ::

        ḡ ± (t_a sₐ² / S + t_b s_b²) / √(sₐ² / S + s_b²),

    since Satterthwaite's interval of 95% covers 87% with two seeds and one method. A site with one patient
    has the variance of the other sites' patients; if all are such, the variance between the sites counts as
    that of the patients.

    ``trainings`` are the differences of the method, by seed, ``others`` those of methods trained as long.

    Example:
        >>> alike = {site: Difference(0.1, error=0.02, patients=10) for site in "ABCD"}
        >>> gain = mean_gain([alike, alike])
        >>> round(gain.mean, 3), round(gain.low, 3), round(gain.high, 3)
        (0.1, 0.083, 0.117)
    """
    methods = [[_mean(by_site) for by_site in method] for method in (trainings, *others)]
    gains = methods[0]
    seeds, mean = len(gains), fmean(gains)
    varied = [variance(of_method) for of_method in methods if len(of_method) > 1]
    of_seeds = fmean(varied) / seeds if varied and seeds > 1 else 0.0
    free_seeds = 4 * len(varied) / (len(varied) + 3) * max(seeds - 1, 1) if varied else 1.0
    of_patients, free_patients = _of_patients(trainings)
    if of_seeds + of_patients <= 1e-24 or seeds < 2:
        return Gain(mean)
    squares = ((of_seeds, free_seeds), (of_patients, free_patients))
    half = sum(square * t_quantile(GAIN_CONFIDENCE, max(free, 1.0)) for square, free in squares)
    half /= math.sqrt(of_seeds + of_patients)
    return Gain(mean, mean - half, mean + half)


def _mean(by_site: BySite) -> float:
    return fmean(difference.mean for difference in by_site.values())


def _of_patients(trainings: Sequence[BySite]) -> tuple[float, float]:
    """Return the variance of the mean by the choice of patients, and its degrees of freedom."""
    sites = sorted({site for by_site in trainings for site in by_site})
    at = {site: [by_site[site] for by_site in trainings if site in by_site] for site in sites}
    known = {
        site: (fmean(errors), counts)
        for site, entries in at.items()
        if (errors := [d.error**2 for d in entries if d.error is not None])
        and (counts := min(d.patients for d in entries)) > 1
    }
    if not known:
        means = [fmean(d.mean for d in entries) for entries in at.values()]
        return (variance(means) / len(means), len(means) - 1.0) if len(means) > 1 else (0.0, 1.0)
    free = sum(count - 1 for _, count in known.values())
    single = sum(count * (count - 1) * error for error, count in known.values()) / free  # of one patient
    errors = [
        known[site][0] if site in known else single / max(1, min(d.patients for d in entries))
        for site, entries in at.items()
    ]
    return sum(errors) / len(sites) ** 2, float(free)
