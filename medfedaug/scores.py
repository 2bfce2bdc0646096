"""Means of scores, some of which there may not be."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["mean_score"]


def mean_score(scores: Iterable[float | None]) -> float | None:
    """The mean of the scores that are known; ``None`` where none is.

    Example:
        >>> mean_score([0.5, None, 1.0]), mean_score([None])
        (0.75, None)
    """
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else None
