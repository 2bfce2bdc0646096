"""Convergence of a run: `is_converged`, and `has_stalled` during the run."""

import math
from collections.abc import Sequence
from statistics import fmean, median, variance

from medfedaug.metrics.significance import t_quantile

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
