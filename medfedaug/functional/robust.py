"""Means of sites' values that a few hostile sites cannot move far.

M sites send one value each, of which at most f may be anything. Every function is invariant to the order of
the sites, up to the rounding of sums.
"""

from torch import Tensor


def coordinate_median(values: Tensor) -> Tensor:
    """The median over the sites, coordinate by coordinate (Yin et al., ICML 2018, Definition 1).

    Of an even number of sites it is the mean of the two in the middle.

    Args:
        values: (M, ...), M at least 1.

    Returns:
        (...).

    Example:
        >>> import torch
        >>> coordinate_median(torch.tensor([[1.0, 5.0], [2.0, -9.0], [1e9, 4.0]]))
        tensor([2., 4.])
    """
    return trimmed_mean(values, (len(values) - 1) // 2)


def trimmed_mean(values: Tensor, cut: int) -> Tensor:
    """The mean over the sites, coordinate by coordinate, without the largest and smallest values.

    Yin et al., ICML 2018, Definition 2, with β = cut/M.

    Args:
        values: (M, ...), M above 2·cut.
        cut: number of values left out at each end.

    Returns:
        (...).

    Example:
        >>> import torch
        >>> trimmed_mean(torch.tensor([0.0, 1.0, 2.0, 3.0, 1e9]), 1)
        tensor(2.)
    """
    if not cut:
        return values.mean(dim=0)
    return values.sort(dim=0).values[cut : len(values) - cut].mean(dim=0)


def clip_factor(norm: float, limit: float) -> float:
    """Factor that brings a vector of this norm to at most the limit: min(1, M/‖Δ‖) (Sun et al., 2019).

    >>> clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(0.0, 1.0)
    (0.25, 1.0, 1.0)
    """
    return limit / norm if norm > limit else 1.0
