"""FedFA's step on the features of a batch as one function, with its derivative written by hand.

The equations are in `medfedaug.functional.features`. On small feature maps autograd takes longer for
the numbers by image and channel than for the features; this module computes each of these numbers once, with
few operations.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medfedaug.functional.passes import (
    Moments,
    affine,
    moments_by_image,
    safe_sqrt,
    spatial_sums,
    two_affine,
    visible_variance,
    working_precision,
)


class Augmented(NamedTuple):
    """Augmented features, with their statistics, which have no gradient.

    Args:
        features: shape and dtype of the argument.
        statistics: μ and σ of the argument, (2, B, C).
        sampled_std: σ̂, (B, C).
    """

    features: Tensor
    statistics: Tensor
    sampled_std: Tensor


def augment_at_once(x: Tensor, gain: Tensor, noise: Tensor, eps: float = 0.0) -> Augmented:
    """`medfedaug.functional.augment_features`, whose gradient flows to the features alone.

    It cannot be used within the transforms of `torch.func`.

    Args:
        x: features, (B, C, *spatial).
        gain: γ + 1 for μ and for σ, (2, C).
        noise: standard normal draws for both, (2, B, C).
        eps: added to the variance.
    """
    work = working_precision(x)
    gain, noise = gain.to(work.dtype)[:, None], noise.to(work.dtype)
    features, statistics, sampled = Augment.apply(work, gain, noise, eps)
    return Augmented(features.to(x.dtype), statistics, sampled)


def within_torch_func() -> bool:
    """Return whether a transform of `torch.func` is active."""
    return bool(torch._C._are_functorch_transforms_active())


class _Step(NamedTuple):
    """The numbers that move the features.

    Args:
        statistics: μ and σ, (2, B, C).
        inverse: 1/σ, 0 where σ is 0; and 1/σ, 0 where σ² without eps is 0; (2, B, C).
        spread: Σ̂ of both, (2, 1, C).
    """

    statistics: Tensor
    inverse: Tensor
    spread: Tensor

    @classmethod
    def of(cls, mean: Tensor, variance: Tensor, gain: Tensor, eps: float) -> _Step:
        """Eq. 2, 4 and 8."""
        variance = visible_variance(mean, variance)
        varies = variance > 0
        if eps:
            std = (variance + eps).sqrt()
            inverse = std.reciprocal()
        else:
            std = _root(variance)
            inverse = torch.where(varies, std, torch.inf).reciprocal()
        statistics = torch.stack((mean, std))
        # Several times faster on a CPU than `torch.var`.
        squares = _centred(statistics).square().mean(dim=1, keepdim=True)
        return cls(statistics, torch.stack((inverse, inverse * varies)), _root(squares * gain))


class Augment(torch.autograd.Function):
    """Features of every image with new statistics (FedFA+ Eq. 2, 4 and 8 to 10).

    ::

        x̂ = (1 + s) x + t,   s = ε_σ Σ̂_σ / σ,   t = ε_μ Σ̂_μ − μ s,
        Σ̂² = g ⊙ (1/B) Σ_b (·^(b) − E_B[·])²

    The derivative uses the sums over each image of the gradient and of gradient times feature.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, noise: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The features, the statistics and the new deviations; arguments as of `augment_at_once`."""
        step = _Step.of(*moments_by_image(x), gain, eps)
        moved = noise * step.spread
        scale = moved[1] * step.inverse[0]
        shift = torch.addcmul(moved[0], step.statistics[0], scale, value=-1)
        sampled = step.statistics[1] + moved[1]
        ctx.save_for_backward(x)
        ctx.numbers = gain, noise, eps, step
        ctx.mark_non_differentiable(step.statistics, sampled)
        return affine(x, 1.0 + scale, shift), step.statistics, sampled

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        gain, noise, eps, step = ctx.numbers
        if torch.is_grad_enabled():  # a second derivative needs the graph of the numbers
            _, mean, variance = Moments.apply(x)
            step = _Step.of(mean, variance, gain, eps)
        statistics, inverses, spread = step
        means, inverse, images, voxels = statistics[0], inverses[0], len(x), math.prod(x.shape[2:])
        scale = noise[1] * spread[1] * inverse
        total, product = spatial_sums(grad, x, means)
        # Derivatives by ε Σ̂ of both, by Σ̂, and by the statistics of each image both ways, times -1/N.
        of_moved = torch.stack((total, product * inverse))
        of_spread = (noise * of_moved).sum(dim=1, keepdim=True)
        pull = of_spread * gain / spread.masked_fill(spread == 0, torch.inf)
        own = of_moved * scale
        of_statistics = torch.addcmul(own, pull, _centred(statistics), value=-1.0 / images) / -voxels
        slope = of_statistics[1] * inverses[1]
        constant = torch.addcmul(of_statistics[0], slope, means, value=-1)
        return two_affine(grad, 1.0 + scale, x, slope, constant), None, None, None


def _centred(statistics: Tensor) -> Tensor:
    return statistics - statistics.mean(dim=1, keepdim=True)


def _root(squared: Tensor) -> Tensor:
    return safe_sqrt(squared) if torch.is_grad_enabled() else squared.clamp_min(0.0).sqrt()
