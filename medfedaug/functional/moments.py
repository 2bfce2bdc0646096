"""Statistics of features, and how they differ between sites (FedFA+ Eq. 2, 6 and 7; FedFD Eq. 2)."""

import torch
from torch import Tensor

from medfedaug.functional.passes import check_shape, moments, safe_sqrt, visible_variance, working_precision


def feature_statistics(x: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel of every image (FedFA+ Eq. 2).

    ::

        μ = (1/(HW)) Σ_(h,w) x^(h,w),   σ = √((1/(HW)) Σ_(h,w) (x^(h,w) − μ)² + eps)

    Args:
        x: features, (B, C, *spatial) with at least one spatial dimension.
        eps: added to the variance, in squared units of `x`.

    Returns:
        `(mean, std)`, (B, C) each, at least float32.

    Deviations:
        The paper has no `eps`; with 0 the result is the printed equation.

    Example:
        >>> x = torch.tensor([[[1.0, 3.0], [5.0, 5.0]]])
        >>> feature_statistics(x)
        (tensor([[2., 5.]]), tensor([[1., 0.]]))
    """
    mean, variance = moments(working_precision(x))
    return mean, safe_sqrt(visible_variance(mean, variance) + eps)


def across_site_variance(values: Tensor) -> Tensor:
    """Variance of a statistic across sites, channel by channel (FedFA+ Eq. 6).

    ::

        Σ² = (1/M) Σₘ (vₘ − E_M[v])²

    Args:
        values: one row per site, (M, C).

    Returns:
        Population variance, (C,), in squared units of `values`. One site gives zeros.

    Deviations:
        None. The public code of the paper takes one variance over sites and channels together, which makes
        `student_t_modulation` of it 1 in every channel.

    Example:
        >>> across_site_variance(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        tensor([1., 0.])
    """
    check_shape("values (M, C)", values, [len(values), values.shape[-1]])
    return torch.var(working_precision(values), dim=0, unbiased=False).to(values.dtype)


def student_t_modulation(variance: Tensor) -> Tensor:
    """Turn variances across sites into weights of mean 1 (FedFA+ Eq. 7).

    ::

        γ^(j) = C k^(j) / (k^(1) + … + k^(C)),   k^(j) = (1 + 1/Σ²^(j))⁻¹

    The kernel k is Student's t distribution with one degree of freedom. It is evaluated as
    ``Σ² / (1 + Σ²)``, which needs no division by a zero variance.

    Args:
        variance: variances across sites, (C,), not negative.

    Returns:
        γ, (C,), without unit; its mean over channels is 1.

    Deviations:
        Where no site differs in any channel (all variances zero, or one site) the printed fraction is 0/0.
        The result is then 1 in every channel, as equal variances give, however small.

    Example:
        >>> student_t_modulation(torch.tensor([1.0, 0.0, 1.0, 1.0]))
        tensor([1.3333, 0.0000, 1.3333, 1.3333])
        >>> student_t_modulation(torch.zeros(3))
        tensor([1., 1., 1.])
    """
    v = working_precision(variance)
    # Two forms of one kernel, for variances above and up to 1: neither divides by zero nor overflows.
    large, one = v > 1, torch.ones_like(v)
    high, low = torch.where(large, v, one), torch.where(large, one, v)
    kernel = torch.where(large, 1.0 / (1.0 + 1.0 / high), low / (1.0 + low))
    total = kernel.sum()
    differs = total > 0
    gamma = v.shape[0] * kernel / torch.where(differs, total, torch.ones_like(total))
    return torch.where(differs, gamma, one).to(variance.dtype)


def mix_statistics(local: Tensor, global_: Tensor, u: Tensor) -> Tensor:
    """Interpolate a normalisation statistic between site and federation (FedFD Eq. 2).

    ::

        μ_Δ = u μₖ + (1 − u) μ_G

    and the same for the standard deviation.

    Args:
        local: the site's statistic, (C,), or of every image, (B, C).
        global_: the federation's statistic, (C,) or (B, C).
        u: interpolation weights in [0, 1], (C,) or (B, C): 1 is local, 0 is global.

    Returns:
        The mixed statistic, shape and dtype of `local`.

    Example:
        >>> mix_statistics(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.25, 1.0]))
        tensor([0.7500, 0.0000])
    """
    for name, value in (("global_", global_), ("u", u)):
        if list(value.shape) != list(local.shape):
            check_shape(name, value, list(local.shape[-1:]))
    work = working_precision(local)
    return torch.lerp(global_.to(work.dtype), work, u.to(work.dtype)).to(local.dtype)
