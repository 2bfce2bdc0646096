"""Normalisation that keeps the phases of features (DAC-SC), without a Fourier transform."""

import torch
from torch import Tensor

from medfedaug.functional.features import normalise_features
from medfedaug.functional.moments import feature_moments
from medfedaug.functional.passes import per_channel, working_precision


def control_style(
    x: Tensor,
    shares: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Features with a mixture of their own amplitudes and normalised ones (DAC-SC's SCNorm).

    With amplitudes α and phases ρ over space, of each channel of each image::

        x̂ = γ F⁻¹(a, ρ(x)) + β,   a = s₁ α(IN(x)) + s₂ α(x)

    The function computes ``γ (s₁ IN(x) + s₂ x) + β``, which is the same: instance
    norm scales all frequencies but zero by ``1 / σ`` and keeps their phases, and at frequency zero
    only x has an amplitude.

    Args:
        x: features, (B, C, *spatial).
        shares: s₁ and s₂, (2,), which are not negative.
        weight: γ, (C,); 1 where ``None``.
        bias: β, (C,); 0 where ``None``.
        eps: added to the spatial variance before its root.

    Returns:
        Features of the shape and dtype of `x`.

    Example:
        >>> control_style(torch.tensor([[[1.0, 3.0]]]), torch.tensor([0.5, 0.5]), eps=0.0)
        tensor([[[0., 2.]]])
    """
    mean, var = feature_moments(x)
    shares = shares.to(mean)
    remaining = shares[1] * mean  # the rest of the mean
    # s1 (x - mean) / std + s2 x, as one normalisation around mean - own / scale.
    scale = shares[0] / (var + eps).sqrt() + shares[1]
    return normalise_features(x, mean - remaining / scale, scale.reciprocal(), weight, bias)


def control_content(
    x: Tensor, normalised: Tensor, mean: Tensor, content: float = 0.5, bias: Tensor | None = None
) -> Tensor:
    """Normalised features with the phases of features from which less was subtracted (DAC-SC's CCNorm).

    ::

        x̂ = F⁻¹(α(y), ρ(x − λμ)),   y = (x − μ)/σ

    with λ = 0 PCNorm, which keeps the phases of x; with 1 the norm itself. Only the phase at
    frequency zero differs, which is 0 or π: where an image's mean is on the one side of
    λμ and on the other side of μ, the function changes the sign of the mean of y.

    Args:
        x: features before the norm, (B, C, *spatial).
        normalised: ``γ y + β``, of the same shape.
        mean: μ, that the norm subtracts, (C,).
        content: λ, from 0 to 1.
        bias: β, (C,); 0 where ``None``.

    Returns:
        ``γ x̂ + β``, of the shape and dtype of `normalised`.

    Example:
        >>> x = torch.tensor([[[1.0, 3.0]]])
        >>> control_content(x, x - 3.0, torch.tensor([3.0]))
        tensor([[[0., 2.]]])
    """
    work = working_precision(normalised)
    space = tuple(range(2, x.dim()))
    with torch.no_grad():  # a sign has no gradient
        means, threshold = working_precision(x).mean(space), mean.to(work.dtype)
        flipped = (means >= content * threshold) != (means >= threshold)
    middle = work.mean(space)
    if bias is not None:
        middle = middle - bias.to(work.dtype)
    shift = torch.where(flipped, -2.0 * middle, 0.0)
    return (work + per_channel(shift, x.dim())).to(normalised.dtype)
