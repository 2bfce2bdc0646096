"""Two rules that compare cases with accepted ones, each with a stated rate of false alarms.

Both assume only that the accepted and the later cases are exchangeable: in a random order of all, every
order has the same probability. Nothing is assumed about the distribution of the measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Course", "case_p_value", "distances", "fewest_cases"]

_RIDGE = 0.1
_SMALL = 1e-12
_LARGEST = 1e100  # evidence beyond says nothing more, and floats end


def distances(values: np.ndarray) -> np.ndarray:
    """Return the squared Mahalanobis distance of each case from the mean of all, (n,).

    d²(x) = zᵀ (R + 0.1 I)⁻¹ z, with z the standard scores of the case and R the correlations of the measures,
    both of the given cases, which are treated alike. The ridge allows fewer cases than measures.

    Args:
        values: (n, measures).

    Example:
        >>> distances(np.array([[1.0], [1.0], [1.0], [5.0]])).argmax().item()
        3
    """
    spread = values.std(axis=0)
    scores = (values - values.mean(axis=0)) / np.where(spread > _SMALL, spread, np.inf)
    correlations = scores.T @ scores / len(scores)
    solved = np.linalg.solve(correlations + _RIDGE * np.eye(values.shape[1]), scores.T)
    # Rounded, so that cases with equal measures have equal distances.
    return (scores * solved.T).sum(axis=1).round(9)


def case_p_value(reference: np.ndarray, case: np.ndarray) -> float:
    """Return the conformal p-value of a case: the share of cases at least as far away, itself included.

    p = #{i: d(xᵢ) ≥ d(x)} / (n + 1) over the n cases of the reference and the case, with `distances` of all
    n + 1. If the case is exchangeable with the reference, P(p ≤ α) ≤ α for every α: the rank of one of n + 1
    exchangeable numbers is uniform, and ties enlarge p. The rate is an average over references; that of one
    reference may be higher or lower.

    Args:
        reference: (n, measures).
        case: (measures,).
    """
    apart = distances(np.vstack([reference, case]))
    return float((apart >= apart[-1]).mean())


def fewest_cases(rate: float) -> int:
    """Return the number of accepted cases from which p ≤ ``rate`` / 1000 is possible: 1/(n + 1) ≤ rate/1000.

    Example:
        >>> fewest_cases(10), fewest_cases(50)
        (99, 19)
    """
    return math.ceil(1000 / rate - _SMALL) - 1


@dataclass
class Course:
    """Evidence over time against exchangeability, for each measure and for the distance of a case.

    The t-th case has, for each measure, the conformal p-value of its rank among all cases so far, accepted
    ones included: p = (#{xᵢ < x} + τ #{xᵢ = x}) / t, with τ uniform. If cases are exchangeable, the p-values
    of a measure are independent and uniform. A bet is a density f on [0, 1], here of Beta(ε, 1), Beta(1, ε)
    or both; its Shiryaev-Roberts statistic is R_t = (1 + R_{t-1}) f(p_t), from R = 0. The rule averages the
    statistics of the bets and gives an alarm when the average of a measure reaches J c, with J the number of
    measures and the distance, and c = 1000 / ``rate``.

    Promise: within n cases, the probability of a false alarm is at most n ``rate`` / 1000. Proof: since
    E f(p) = 1, R_t - t is a martingale, and so is the average over the bets. Let τ be the first time at which
    the average of measure j reaches J c. Optional stopping at min(τ, n) gives J c P(τ ≤ n) ≤ E min(τ, n) ≤ n;
    the sum over the J measures is at most n / c.

    Source: V. Vovk, "Testing randomness online", Statistical Science 36 (2021), arXiv:1906.09256.

    Deviations:
        Vovk has one sequence of p-values and one bet; here, bets are averaged and measures share the rate.
    """

    values: np.ndarray  # (t, measures), all cases so far; first the accepted ones
    rate: float  # alarms per thousand cases
    # (J, bets), the statistics after the last case; the distance is the last row.
    evidence: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def __post_init__(self) -> None:
        if not self.evidence.size:
            self.evidence = np.zeros((self.values.shape[1] + 1, len(_bets(np.full(1, 0.5)))))

    @property
    def shares(self) -> np.ndarray:
        """The evidence of each measure, and of the distance, as a share of the alarm's."""
        return self.evidence.mean(axis=1) * self.rate / (1000 * len(self.evidence))

    def add(self, case: np.ndarray) -> None:
        """Add a case, (measures,)."""
        self.values = np.vstack([self.values, case])
        # Ties are broken at random, by numbers that depend on nothing but the position.
        ties = np.random.default_rng(len(self.values)).uniform(_SMALL, 1 - _SMALL, len(self.evidence))
        columns = np.column_stack([self.values, distances(self.values)])
        below, equal = (columns < columns[-1]).sum(axis=0), (columns == columns[-1]).sum(axis=0)
        bets = _bets((below + ties * equal) / len(columns))
        self.evidence = np.minimum((1 + self.evidence) * bets.T, _LARGEST)


def _bets(p: np.ndarray) -> np.ndarray:
    """Return the densities of the bets, (bets, measures): on low values, on high ones, on both."""
    low, high = ([e * q ** (e - 1) for e in (0.25, 0.6)] for q in (p, 1 - p))
    return np.stack([*low, *high, (low[0] + high[0]) / 2])
