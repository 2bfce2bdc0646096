"""Features and images with other statistics (FedFA+ Eq. 4 and 8 to 10; FedFD; FedRobust)."""

import torch
from torch import Tensor

from medfedaug.functional.moments import feature_statistics
from medfedaug.functional.passes import affine, check_shape, safe_sqrt, working_precision


def augmentation_spread(statistic: Tensor, gamma: Tensor) -> Tensor:
    """Return the standard deviation of the noise on a feature statistic (FedFA+ Eq. 4 and 8).

    ::

        Σ̂ = √((γ + 1) ⊙ Σ²),   Σ² = (1/B) Σ_b (s^(b) − E_B[s])²

    Args:
        statistic: the mean or the standard deviation of every image, (B, C).
        gamma: modulated variance across sites, (C,); zero leaves the site's own variance.

    Returns:
        The standard deviation of the Gaussian, (C,), in units of `statistic`; 0 for one image (B = 1).

    Example:
        >>> augmentation_spread(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([3.0, 3.0]))
        tensor([2., 0.])
    """
    work = working_precision(statistic)
    variance = torch.var(work, dim=0, unbiased=False)
    return safe_sqrt((gamma.to(work.dtype) + 1.0) * variance)


def perturb_features(
    x: Tensor,
    mean: Tensor,
    std: Tensor,
    spread_mean: Tensor,
    spread_std: Tensor,
    noise_mean: Tensor,
    noise_std: Tensor,
) -> Tensor:
    """Move the features of every image to new statistics (FedFA+ Eq. 9 and 10).

    ::

        x̂ = σ̂ (x − μ)/σ + μ̂,   μ̂ = μ + ε_μ Σ̂_μ,   σ̂ = σ + ε_σ Σ̂_σ

    It is evaluated as ``x (1 + s) + t`` with ``s = ε_σ Σ̂_σ / σ`` and
    ``t = ε_μ Σ̂_μ − μ s``: the same value in one pass over `x`, and exactly `x` when
    the noise or the spread is zero.

    Args:
        x: features, (B, C, *spatial).
        mean: their mean, (B, C), as `feature_statistics` gives it.
        std: their standard deviation, (B, C).
        spread_mean: standard deviation of the new mean, (C,).
        spread_std: standard deviation of the new standard deviation, (C,).
        noise_mean: standard normal draws, (B, C).
        noise_std: standard normal draws, (B, C).

    Returns:
        The augmented features, shape and dtype of `x`.

    Deviations:
        A channel that is constant in an image (zero `std`) has no normalised feature; it counts as zero, so
        only the mean moves. The sign of a negative σ̂ is kept; the paper does not mention the
        case.

    Example:
        >>> x = torch.tensor([[[1.0, 3.0]]])
        >>> mean, std = feature_statistics(x)
        >>> one = torch.ones(1)
        >>> perturb_features(x, mean, std, one, one, torch.tensor([[10.0]]), torch.tensor([[1.0]]))
        tensor([[[10., 14.]]])
    """
    work = working_precision(x)
    varies = std > 0
    scale = noise_std.to(work.dtype) * spread_std / torch.where(varies, std, torch.ones_like(std))
    scale = torch.where(varies, scale, torch.zeros_like(scale)).to(work.dtype)
    shift = (noise_mean.to(work.dtype) * spread_mean - mean * scale).to(work.dtype)
    return affine(work, 1.0 + scale, shift).to(x.dtype)


def augment_features(
    x: Tensor, gamma_mean: Tensor, gamma_std: Tensor, noise_mean: Tensor, noise_std: Tensor, eps: float = 0.0
) -> Tensor:
    """Federated feature augmentation of one batch (FedFA+ Eq. 2, 4, 8, 9, 10).

    The statistics of every image are replaced by draws from Gaussians around them. The variance of the
    Gaussians is that of the batch, widened by `gamma` in the channels in which the sites differ:
    ``Σ̂² = (γ + 1) ⊙ Σ²``. Gradients flow through the statistics (Eq. 10 is the
    reparametrisation trick).

    Args:
        x: features, (B, C, *spatial); 1D, 2D and 3D alike.
        gamma_mean: modulated variance of the mean across sites, (C,) (`student_t_modulation`).
        gamma_std: the same of the standard deviation, (C,).
        noise_mean: standard normal draws, (B, C).
        noise_std: standard normal draws, (B, C).
        eps: added to the spatial variance, in squared units of `x`.

    Returns:
        The augmented features, shape and dtype of `x`. Zero noise, and a batch of one image, give `x`
        exactly.

    Deviations:
        Variances are population variances, as printed; the public code of the paper takes the unbiased
        variance over the batch, which is undefined for one image. See `perturb_features` for constant
        channels and negative standard deviations.

    Example:
        >>> x = torch.tensor([[[0.0, 2.0]], [[4.0, 8.0]]])
        >>> zero, noise = torch.zeros(1), torch.tensor([[1.0], [-1.0]])
        >>> augment_features(x, zero, zero, noise, noise)
        tensor([[[2., 5.]],
        <BLANKLINE>
                [[2., 5.]]])
    """
    for name, value in (("gamma_mean", gamma_mean), ("gamma_std", gamma_std)):
        check_shape(name, value, [x.shape[1]])
    for name, value in (("noise_mean", noise_mean), ("noise_std", noise_std)):
        check_shape(name, value, list(x.shape[:2]))
    mean, std = feature_statistics(x, eps)
    spread_mean, spread_std = augmentation_spread(mean, gamma_mean), augmentation_spread(std, gamma_std)
    return perturb_features(x, mean, std, spread_mean, spread_std, noise_mean, noise_std)


def normalising(
    mean: Tensor, std: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scale and shift, (B, C) each, of ``γ (a − μ)/σ + β`` (FedFD section 3.1).

    Args:
        mean: μ, (B, C).
        std: σ, (B, C), positive.
        weight: γ, (C,); 1 where ``None``.
        bias: β, (C,); 0 where ``None``.
    """
    scale = std.reciprocal() if weight is None else weight.to(std.dtype) / std
    if bias is None:
        return scale, -mean * scale
    return scale, torch.addcmul(bias.to(std.dtype), mean, scale, value=-1)
