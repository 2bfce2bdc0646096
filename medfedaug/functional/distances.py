"""Distances of features: between histograms (FedFA+ Eq. 11 to 14), and from those of their class (FRAug)."""

import math

import torch
from torch import Tensor

from medfedaug.functional.features import check_shape, working_precision


def soft_histogram(
    z: Tensor, bins: int = 8, tau: float = 0.01, low: Tensor | None = None, high: Tensor | None = None
) -> Tensor:
    """Differentiable histogram of every channel (FedFA+ Eq. 11 and 12).

    ::

        π_c = (1/N) Σᵢ softmax((w ẑ_cⁱ + b) / τ),
        ẑ_cⁱ = (z_cⁱ − z_c^min) / (z_c^max − z_c^min)

    with ``w = [1, …, L]``, ``b = [0, −ρ₁, …, −(ρ₁ + … + ρ_(L−1))]`` and the L - 1
    cut points ``ρ = [0, 1, …, L − 2] / (L − 2)``. The first and the last cut point are the ends of
    the range, so L - 2 bins divide the range and the two outermost ones are open to either side.

    Args:
        z: samples, (N, C).
        bins: number of bins L, at least 2.
        tau: temperature of the softmax, positive; towards 0 the bins become hard.
        low: smallest value of each channel, (C,); default: of `z` itself.
        high: largest value of each channel, (C,); default: of `z` itself.

    Returns:
        The histogram, (C, L), each row summing to 1. Memory is N x C x L.

    Deviations:
        * Values outside [`low`, `high`] (a mini-batch can leave the range of the stored minimum and maximum)
          are not clamped: they fall into the open outermost bin on their side and keep their gradient.
        * L = 2 makes ``ρ = [0] / 0``; the one cut point is then the middle, 0.5, about which the cut
          points of every other L are symmetric.
        * A channel without extent (`high` equal to `low`) is shifted by `low` and not scaled.

    Example:
        >>> z = torch.tensor([[0.0], [0.4], [0.6], [1.0]])
        >>> soft_histogram(z, bins=4)
        tensor([[0.1250, 0.3750, 0.3750, 0.1250]])
    """
    work = working_precision(z)
    for name, limit in (("low", low), ("high", high)):
        if limit is not None:
            check_shape(name, limit, [z.shape[1]])
    lowest = work.amin(dim=0) if low is None else low.to(work)
    highest = work.amax(dim=0) if high is None else high.to(work)
    extent = highest - lowest
    scaled = (work - lowest) / torch.where(extent > 0, extent, torch.ones_like(extent))
    weight = torch.arange(1, bins + 1, dtype=work.dtype, device=work.device)
    cuts = torch.arange(bins - 1, dtype=work.dtype, device=work.device) / max(bins - 2, 1)
    if bins == 2:
        cuts = cuts + 0.5
    bias = torch.cat([torch.zeros_like(cuts[:1]), -torch.cumsum(cuts, dim=0)])
    logits = (scaled.unsqueeze(-1) * weight + bias) / tau
    return torch.softmax(logits, dim=-1).mean(dim=0).to(z.dtype)


def symmetric_kl(p: Tensor, q: Tensor, eps: float = 1e-8) -> Tensor:
    """Symmetric Kullback-Leibler divergence of two histograms (FedFA+ Eq. 14).

    ::

        (1/C) Σ_c (D_KL(p_c ‖ q_c) + D_KL(q_c ‖ p_c))/2
            = (1/(2C)) Σ_(c,l) (p_cl − q_cl)(log p_cl − log q_cl)

    Args:
        p: histogram, (C, L), rows summing to 1.
        q: histogram, (C, L), rows summing to 1.
        eps: smallest probability whose logarithm is taken.

    Returns:
        A scalar in nats, not negative, zero for equal histograms.

    Deviations:
        The equation does not say how channels are combined: it is their mean. An empty bin counts as `eps` in
        the logarithm, because the divergence from it is infinite otherwise.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
        >>> symmetric_kl(p, q)
        tensor(0.1373)
    """
    check_shape("q", q, list(p.shape))
    a, b = working_precision(p), working_precision(q)
    divergence = 0.5 * (a - b) * (torch.log(a.clamp_min(eps)) - torch.log(b.clamp_min(eps)))
    return divergence.sum(dim=1).mean().to(p.dtype)


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
