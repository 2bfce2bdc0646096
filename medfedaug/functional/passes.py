"""The passes over features that the equations share, made fast on CPU and GPU.

There are two implementations of each pass: plain operations, which compilers fuse, and functions whose
derivatives are written by hand, which need half the passes and memory of what autograd makes of the former.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def working_precision(x: Tensor) -> Tensor:
    """Convert half precision to float32, and leave other floating point types as they are.

    Raises:
        TypeError: when `x` is not floating point.

    Example:
        >>> working_precision(torch.ones(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if not x.is_floating_point():
        raise TypeError(f"expected a floating point tensor, got {x.dtype}")
    if x.dtype == torch.float16 or x.dtype == torch.bfloat16:
        return x.float()
    return x


def safe_sqrt(variance: Tensor) -> Tensor:
    # The inner `where` keeps the infinite derivative at zero out of the graph: masking the result alone would
    # still multiply it by zero and give NaN.
    positive = variance > 0
    root = torch.sqrt(torch.where(positive, variance, torch.ones_like(variance)))
    return torch.where(positive, root, torch.zeros_like(variance))


def per_channel(values: Tensor, ndim: int) -> Tensor:
    """(B, C) -> (B, C, 1, ...), to broadcast against features with `ndim` dimensions."""
    return values.reshape(list(values.shape) + [1] * (ndim - 2))


# On a CPU, features of more bytes per image than this are processed one image at a time: the second pass then
# finds the image in the cache, and no array as large as the whole batch is needed.
_LARGE = 10**5


def is_large(x: Tensor) -> bool:
    return x[:1].numel() * x.element_size() > _LARGE


def moments_by_image(x: Tensor) -> tuple[Tensor, Tensor]:
    if not x.is_cuda and x.shape[0] > 1 and is_large(x):
        means, variances = zip(*map(moments_by_image, x.split(1)), strict=True)
        return torch.cat(means), torch.cat(variances)
    spatial = list(range(2, x.dim()))
    mean = x.mean(dim=spatial)
    return mean, (x - per_channel(mean, x.dim())).square_().mean(dim=spatial)


def plain_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    # Two passes: several times faster on a CPU than `torch.var_mean`, and as exact.
    spatial = list(range(2, x.dim()))
    mean = x.mean(dim=spatial)
    return mean, (x - per_channel(mean, x.dim())).square().mean(dim=spatial)


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if x.is_contiguous() and not x.is_cuda:
        # A CPU's `addcmul` is not vectorised along an axis on which an operand is repeated.
        return (x * per_channel(scale, x.dim())).add_(per_channel(shift, x.dim()))
    return torch.addcmul(per_channel(shift, x.dim()), x, per_channel(scale, x.dim()))


class Moments(torch.autograd.Function):
    """`plain_moments`, keeping nothing but its argument, with a derivative that takes one pass over it."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return moments_by_image(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[0])

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_variance: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        # The derivative by x of the mean is 1/N, that of the variance 2 (x - mean) / N.
        voxels = math.prod(x.shape[2:])
        slope = 2.0 * grad_variance / voxels
        return affine(x, slope, grad_mean / voxels - slope * mean)


class Affine(torch.autograd.Function):
    """`affine`, with a derivative that keeps no array as large as its argument."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return affine(x, scale, shift)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        spatial = list(range(2, x.dim()))
        product = grad * x
        grad_scale, factor = product.sum(dim=spatial), per_channel(scale, x.dim())
        # Fresh memory costs a CPU as much as the product itself.
        grad_x = grad * factor if torch.is_grad_enabled() else torch.mul(grad, factor, out=product)
        return grad_x, grad_scale, grad.sum(dim=spatial)
