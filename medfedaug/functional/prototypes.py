"""Distance of features from those of their class, and a ramp (FRAug)."""

import math

import torch
from torch import Tensor

from medfedaug.functional.passes import working_precision


def gaussian_mmd(x: Tensor, y: Tensor, bandwidth: float | Tensor) -> Tensor:
    """Squared maximum mean discrepancy of two samples (Gretton et al., JMLR 2012; FRAug Eq. 5 and 6).

    ::

        E[k(x, x′)] + E[k(y, y′)] − 2 E[k(x, y)],   k(a, b) = exp(−‖a − b‖² / (2 s²))

    The means are over all pairs, including those of an element with itself, so that the value is never
    negative and a sample may have one element, as where there is one prototype per class. (MONAI's
    `MMDMetric` is the unbiased estimate with a linear kernel; it needs two of each, and no mapping of finite
    width makes it Gaussian.)

    Args:
        x: one sample, (N, D).
        y: the other, (M, D).
        bandwidth: s, in units of `x`, positive.

    Returns:
        A scalar in [0, 2].

    Deviations:
        The paper names the distance and not the kernel or its width.

    Example:
        >>> a = torch.tensor([[0.0], [1.0]])
        >>> float(gaussian_mmd(a, a, 1.0)), round(float(gaussian_mmd(a, a + 100.0, 1.0)), 3)
        (0.0, 1.607)
    """
    both = torch.cat([working_precision(x), working_precision(y)])
    kernel = torch.exp((both[:, None] - both[None]).square().sum(dim=2) / (-2.0 * bandwidth**2))
    n = x.shape[0]
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2.0 * kernel[:n, n:].mean()


def ramp_up(step: int, length: int) -> float:
    """The exponential ramp-up ``exp(−5(1 − t)²)``, t = step / length, at most 1.

    Laine and Aila, "Temporal ensembling for semi-supervised learning", 2017, to which FRAug refers.

    Args:
        step: number of steps made so far.
        length: number of steps after which the value is 1; 0 for 1 from the start.

    Example:
        >>> [round(ramp_up(step, 100), 3) for step in (0, 50, 100, 150)]
        [0.007, 0.287, 1.0, 1.0]
    """
    if length <= 0 or step >= length:
        return 1.0
    return math.exp(-5.0 * (1.0 - step / length) ** 2)
