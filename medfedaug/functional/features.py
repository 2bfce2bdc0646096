"""Statistics of features, across sites too, and features with other statistics (FedFA+, FedFD, FedRobust)."""

from collections.abc import Callable

import torch
from torch import Tensor


def working_precision(x: Tensor) -> Tensor:
    """Convert half precision to float32, and leave other floating point types as they are.

    A subclass of `torch.Tensor` becomes a plain tensor (`plain_tensor`).

    Example:
        >>> working_precision(torch.ones(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    x = plain_tensor(x)
    if x.dtype == torch.float16 or x.dtype == torch.bfloat16:
        return x.float()
    return x


def plain_tensor(x: Tensor) -> Tensor:
    """Make a subclass of `torch.Tensor`, such as MONAI's ``MetaTensor``, a plain tensor.

    PyTorch forbids to change the views in place that a subclass makes within the functions of this package. A
    layer that uses its features twice does this once, so that their gradients are added up in one order.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript compiles a condition beside this one
        if type(x) is not Tensor:
            x = x.as_subclass(Tensor)
    return x


def check_shape(name: str, value: Tensor, shape: list[int]) -> None:
    """Check a shape that broadcasting would take for another one, with a result that is wrong."""
    if list(value.shape) != shape:
        raise ValueError(f"expected {name} of shape {shape}, got {list(value.shape)}")


def safe_sqrt(variance: Tensor) -> Tensor:
    # The inner `where` keeps the infinite derivative at zero out of the graph: masking the result alone would
    # still multiply it by zero and give NaN.
    positive = variance > 0
    root = torch.sqrt(torch.where(positive, variance, torch.ones_like(variance)))
    return torch.where(positive, root, torch.zeros_like(variance))


def visible_variance(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the variance, (B, C), with 0 where it is no larger than the rounding of the mean.

    The mean of a constant need not be that constant to the last bit. A division by the root of such a
    variance would enlarge the rounding to the size of a feature.
    """
    return variance * (torch.addcmul(variance, mean, mean, value=-(resolution(mean.dtype) ** 2)) > 0)


def resolution(kind: torch.dtype) -> float:
    """Return the largest deviation of a constant by rounding, as a share of the mean."""
    return 1e-15 if kind == torch.float64 else 1e-6


def per_channel(values: Tensor, ndim: int) -> Tensor:
    """(B, C) -> (B, C, 1, ...), to broadcast against features with `ndim` dimensions."""
    return values.reshape(list(values.shape) + [1] * (ndim - 2))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each channel of each image, (B, C) each."""
    # Two passes: several times faster on a CPU than `torch.var_mean`, and as exact.
    spatial = list(range(2, x.dim()))
    mean = x.mean(dim=spatial)
    centred = x - per_channel(mean, x.dim())
    squares = centred.square() if torch.is_grad_enabled() else centred.square_()
    return mean, squares.mean(dim=spatial)


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Scale and shift each channel of each image, by (B, C) each."""
    if x.is_contiguous() and not x.is_cuda:
        # A CPU's `addcmul` is not vectorised along an axis on which an operand is repeated.
        return (x * per_channel(scale, x.dim())).add_(per_channel(shift, x.dim()))
    return torch.addcmul(per_channel(shift, x.dim()), x, per_channel(scale, x.dim()))


def scale_by_moments(x: Tensor, move: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Scale and shift features by numbers that follow from their moments; shape and dtype of `x`.

    Args:
        x: features, (B, C, *spatial).
        move: returns scale and shift, given mean and population variance, (B, C) each, at least float32.
    """
    work = working_precision(x)
    return affine(work, *move(*moments(work))).to(x.dtype)


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
