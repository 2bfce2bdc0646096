"""`is_converged` and `longer`: whether more rounds would still have improved a run, and how many to try."""

from __future__ import annotations

from collections.abc import Sequence

_STEP = 0.01
ATTEMPTS = (1, 2, 4)
"""Times the first number of rounds, of each attempt at a training that converges."""


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


def longer(validation: Sequence[float | None], first: int) -> int | None:
    """Return the number of rounds of the next attempt: twice as many, or ``None`` where no other is made.

    Args:
        validation: the score of each round of the last attempt; none follows where it `is_converged`.
        first: the number of rounds of the first attempt, of which no attempt has more than four times.

    Example:
        >>> rising = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
        >>> longer(rising, first=6), longer(rising, first=1), longer([0.6] * 6, first=6)
        (12, None, None)
    """
    wanted = 2 * len(validation)
    return None if is_converged(validation) or wanted > ATTEMPTS[-1] * first else wanted
