"""Convergence of a run: `is_converged`, `has_stalled` during the run, and the rounds of the next attempt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

from medfedaug.metrics.significance import t_quantile

_STEP = 0.01
ATTEMPTS = (1, 2, 4)
"""Factors of the first number of rounds, for each attempt at a training that converges."""


def is_converged(validation: Sequence[float | None]) -> bool:
    """Return whether the last third of the rounds brought at most 0.01 to the best validation score.

    Args:
        validation: the score of each round, higher is better; fewer than three rounds do not converge.

    Example:
        >>> is_converged([0.3, 0.5, 0.6, 0.6, 0.6, 0.6]), is_converged([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
        (True, False)
    """
    scores = [score or 0.0 for score in validation]
    first = -(-len(scores) * 2 // 3)
    return len(scores) > first and max(scores[first:]) <= max(scores[:first]) + _STEP


def has_stalled(validation: Sequence[float], patience: int, *, higher_is_better: bool = True) -> bool:
    """Return whether the last scores are no better than as many before, beyond the noise between rounds.

    The mean gain g of the last n scores over the n before counts if it exceeds
    ``t_(0.95, 2n−2) √((s₁² + s₂²) / n)``, the one-sided 95% limit of Student's two-sample test.

    Args:
        validation: the score of each validated round so far.
        patience: n, at least 2.
        higher_is_better: the direction of the score.

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


def longer(validation: Sequence[float | None], first: int) -> int | None:
    """Return the number of rounds of the next attempt: twice as many, or ``None`` without another attempt.

    Args:
        validation: the score of each round of the last attempt; none follows if it `is_converged`.
        first: the number of rounds of the first attempt; no attempt has more than four times as many.

    Example:
        >>> rising = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
        >>> longer(rising, first=6), longer(rising, first=1), longer([0.6] * 6, first=6)
        (12, None, None)
    """
    wanted = 2 * len(validation)
    return None if is_converged(validation) or wanted > ATTEMPTS[-1] * first else wanted
