"""`is_converged`: whether more rounds would still have improved a run."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["is_converged"]

_STEP = 0.01


def is_converged(validation: Sequence[float | None]) -> bool:
    """Return whether the last third of the rounds brought at most 0.01 to the best validation score.

    Args:
        validation: the score of each round, higher is better; of fewer than three rounds nothing is known.

    Example:
        >>> is_converged([0.3, 0.5, 0.6, 0.6, 0.6, 0.6]), is_converged([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
        (True, False)
    """
    scores = [score or 0.0 for score in validation]
    first = -(-len(scores) * 2 // 3)
    return len(scores) > first and max(scores[first:]) <= max(scores[:first]) + _STEP
