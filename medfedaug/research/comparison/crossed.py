"""`crossed_test` tests a mean difference with the chance of other trainings and other patients together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medfedaug.metrics.significance import t_quantile, t_two_sided


@dataclass(frozen=True)
class CrossedTest:
    """Result of `crossed_test`.

    Attributes:
        difference: mean over the patients of their mean differences.
        low: lower end of its 95% interval.
        high: upper end.
        p: two-sided p-value, at most 0.05 if and only if the interval excludes 0.
    """

    difference: float
    low: float
    high: float
    p: float
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
