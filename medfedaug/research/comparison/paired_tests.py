"""Tests of a paired difference: of trainings and patients together, by random signs, against rare loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from medfedaug.metrics.significance import detectable_difference, t_quantile, t_two_sided


@dataclass(frozen=True)
class CrossedTest:
    """Result of `crossed_test`."""

    difference: float  # mean over the patients of their mean differences
    low: float  # lower end of its 95% interval
    high: float  # upper end
    p: float  # two-sided p-value, at most 0.05 if and only if the interval excludes 0
    trainings: int
    patients: int


def crossed_test(differences: Sequence[Sequence[float]]) -> CrossedTest | None:
    """Test a mean difference over samples of trainings and of patients.

    Each training scores each patient, so the two effects are crossed:
    ``dₛₚ = δ + aₛ + bₚ + eₛₚ``. With sₐ² the variance of the trainings' means and
    ``s_b²`` the variance of the patients' means, ::

        T = d̄ / √v,   v = sₐ² / S + s_b² / P,
        f = v² / ((sₐ² / S)²/(S − 1) + (s_b² / P)²/(P − 1))

    has about Student's t distribution with f degrees of freedom (Satterthwaite, Biometrics Bulletin, 1946).
    Both variances contain the residual, which makes v too large rather than too small.

    If few patients differ much and the others little, this interval is too short on one side. Hall's
    transformation (Journal of the Royal Statistical Society B, 1992) corrects it for the skewness
    γ of the patients' means, ``g = γ (s_b² / P / v)^(3/2) / √P``::

        T′ = T + g T² / 3 + g² T³ / 27 + g / 6.

    The p-value is the larger of the two, and the interval is the union of both.

    Args:
        differences: (S, P), differences of S trainings and P patients; NaN for a missing score. Trainings and
            patients without any score are left out.

    Returns:
        The test; ``None`` for fewer than two trainings or three patients, and without variation.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> test = crossed_test(0.05 + 0.01 * rng.standard_normal((5, 30)))
        >>> test.low > 0.04, test.p < 1e-6
        (True, True)
    """
    table = np.asarray(differences, dtype=np.float64)
    if table.ndim == 2:
        known = ~np.isnan(table)
        table = table[known.any(axis=1)][:, known.any(axis=0)]
    if table.ndim != 2 or table.shape[0] < 2 or table.shape[1] < 3:
        return None
    trainings, patients = table.shape
    by_training, by_patient = np.nanmean(table, axis=1), np.nanmean(table, axis=0)
    mean = float(by_patient.mean())
    of_trainings = float(by_training.var(ddof=1)) / trainings
    of_patients = float(by_patient.var(ddof=1)) / patients
    variance = of_trainings + of_patients
    if variance <= 1e-24:
        return None
    freedom = variance**2 / (of_trainings**2 / (trainings - 1) + of_patients**2 / (patients - 1))
    error, skew = math.sqrt(variance), 0.0
    if of_patients > 1e-24:
        centred = by_patient - mean
        skew = float((centred**3).mean() / (centred**2).mean() ** 1.5)
        skew *= math.sqrt(patients * (patients - 1)) / (patients - 2) / math.sqrt(patients)
        skew *= (of_patients / variance) ** 1.5
    t = mean / error
    p = max(t_two_sided(value, freedom) for value in (t, _transformed(t, skew)))
    limit = t_quantile(0.95, freedom)
    ends = [end for sign in (-1, 1) for end in (sign * limit, _original(sign * limit, skew))]
    return CrossedTest(
        difference=mean,
        low=mean - error * max(ends),
        high=mean - error * min(ends),
        p=p,
        trainings=trainings,
        patients=patients,
    )


def _transformed(t: float, skew: float) -> float:
    return t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6


def _original(value: float, skew: float) -> float:
    """Invert `_transformed`."""
    if abs(skew) < 1e-6:  # the two differ by less than the rounding of the cube root
        return value
    return 3 / skew * (float(np.cbrt(1 + skew * (value - skew / 6))) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Holm, Scandinavian Journal of Statistics, 1979).

    The i-th smallest of m becomes the largest ``(m − j + 1) p_(j)`` with j up to i, and 1 at most.
    The probability of at least one value below α without a difference is α at most.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


_ASSIGNMENTS = 10_000  # of signs; up to 13 differences have fewer assignments


def sign_flip_test(differences: Sequence[float]) -> tuple[float, float, float]:
    """Test a mean difference by randomisation; return the p-value, and the interval of accepted means.

    If the true mean is δ, each ``dᵢ − δ`` is as likely to have the other sign (Fisher,
    1935). With ``aₛ = mean(sᵢ dᵢ)`` and ``bₛ = mean(sᵢ)`` over the assignments
    ``s ∈ {−1, 1}ⁿ``, ::

        p(δ) = Pₛ(|aₛ − δ bₛ| ≥ |d̄ − δ|),

    and an assignment is at least as extreme exactly for the δ between
    ``(d̄ − aₛ) / (1 − bₛ)`` and ``(d̄ + aₛ) / (1 + bₛ)``. Hence p is the share of these
    ranges that contain 0, and the interval, in which ``p(δ) > 0.05``, follows from their ends. It
    excludes 0 if and only if p is at most 0.05. If there are more than 10,000 assignments, 10,000 are drawn
    at random, with a fixed seed. The differences, two or more, are independent, for example one per patient.

    Example:
        >>> p, low, high = sign_flip_test([0.5, 1.0, 2.0, 0.1, 3.0, 1.5])
        >>> p, low > 0
        (0.03125, True)
    """
    # Rounded, since 0.3 - 0.2 and 0.2 - 0.1 are the same difference.
    sample = np.round(np.asarray(differences, dtype=np.float64), 12)
    n = len(sample)
    mean = float(sample.mean())
    flipped, balance = _assignments(sample, np.random.default_rng(0))
    # If all signs are equal, the condition always holds: such an assignment is always at least as extreme.
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = np.stack([(mean - flipped) / (1 - balance), (mean + flipped) / (1 + balance)])
    alike = np.abs(balance) > 1 - 0.5 / n
    # Equal sums in another order may differ in the last digits.
    ends[np.abs(ends) <= 1e-9 * float(np.abs(sample).max())] = 0.0
    lower = np.sort(np.where(alike, -np.inf, ends.min(axis=0)))
    upper = np.sort(np.where(alike, np.inf, ends.max(axis=0)))
    p = np.count_nonzero((lower <= 0) if mean > 0 else (upper >= 0)) / len(lower)
    allowed = math.floor(0.05 * len(lower) + 1e-9)  # assignments outside the interval
    return float(p), float(lower[allowed]), float(upper[-1 - allowed])


def _assignments(sample: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a_s and b_s for all assignments of signs, or for the given one and 9,999 random ones."""
    n = len(sample)
    if 2**n <= _ASSIGNMENTS:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return signs @ sample / n, signs.mean(axis=1)
    rows = max(1, 2**22 // n)
    flipped, balance = [np.array([sample.mean()])], [np.ones(1)]
    for start in range(1, _ASSIGNMENTS, rows):
        signs = rng.integers(0, 2, (min(rows, _ASSIGNMENTS - start), n), dtype=np.int8) * 2.0 - 1.0
        flipped.append(signs @ sample / n)
        balance.append(signs.mean(axis=1))
    return np.concatenate(flipped), np.concatenate(balance)


def rare_loss_test(differences: Sequence[float], worst: float) -> float:
    """Return the probability of such gains if rare losses, which this sample need not contain, undo them.

    A method that misses a structure in 5% of patients loses there what it gains elsewhere, and 20 patients
    contain none of those 5% in one sample of three. No test of the observed differences alone can see this.
    With the worst possible difference ``w`` and weights W from a flat Dirichlet distribution,

        p = P(W₀ w + Σᵢ Wᵢ dᵢ ≤ 0),    W = E / Σ E,    E₀, …, Eₙ independent and exponential with mean 1,

    is the level of the lower confidence limit of Gaffke (Mathematical Methods of Statistics, 2005; see
    Learned-Miller and Thomas, arXiv 1905.06208) that touches 0. The p-value here is two-sided, 2p. The
    probability is that of a sum of exponentials, by Gil-Pelaez's inversion of its characteristic function.
    With equal differences d it is 2 (1 − d / (d − w))ⁿ, here 2 (0.7 / 0.75)ⁿ.

    Args:
        differences: n differences in the direction of the claim, one per patient; a gain is positive.
        worst: the smallest difference that a patient can have, below 0.

    Returns:
        The two-sided p-value, at most 1.

    Example:
        >>> [round(rare_loss_test([0.05] * patients, worst=-0.7), 4) for patients in (20, 120)]
        [0.5032, 0.0005]
    """
    from scipy.integrate import quad

    values = np.append(np.asarray(differences, dtype=np.float64), worst)
    values = values[values != 0]
    if not (values > 0).any():
        return 1.0
    values /= np.abs(values).max()

    def integrand(angle: float) -> float:
        t = math.tan(angle)
        phase = float(np.arctan(t * values).sum())
        modulus = math.exp(-0.5 * float(np.log1p((t * values) ** 2).sum()))
        return math.sin(phase) * modulus * (1 + t * t) / t

    area, _ = quad(integrand, 1e-12, math.pi / 2 - 1e-12, limit=400)
    return min(1.0, max(0.0, 1.0 - 2.0 * float(area) / math.pi))


@dataclass(frozen=True)
class PatientTest:
    """Comparison of two methods on the same patients."""

    difference: float  # mean difference over the patients
    low: float  # lower end of its 95% interval (`sign_flip_test`), minus infinity for five patients or fewer
    high: float  # upper end
    p: float  # two-sided p-value of the same test; at most 0.05 if and only if the interval excludes 0
    patients: int
    better: int  # patients whose score is better than the baseline's
    worse: int  # patients whose score is worse
    # The smallest true difference that the test detects with probability 0.8, for the number of patients and
    # the spread of the differences (`detectable_difference`).
    detectable: float


def compare_patients(
    values: Sequence[float], baseline: Sequence[float], *, higher_is_better: bool = True
) -> PatientTest:
    """Compare two methods by their scores of the same patients, two or more.

    Example:
        >>> test = compare_patients([0.7, 0.8, 0.6, 0.9], [0.6, 0.5, 0.4, 0.5])
        >>> round(test.difference, 3), test.better, test.p
        (0.25, 4, 0.125)
    """
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    p, low, high = sign_flip_test(differences)
    gains = [d if higher_is_better else -d for d in differences]
    return PatientTest(
        difference=fmean(differences),
        low=low,
        high=high,
        p=p,
        patients=len(differences),
        better=sum(gain > 0 for gain in gains),
        worse=sum(gain < 0 for gain in gains),
        detectable=detectable_difference(stdev(differences), len(differences)),
    )
