"""The passes over features that the equations share, made fast on CPU and GPU.

There are two implementations of each pass: plain operations, which compilers fuse, and functions whose
derivatives are written by hand, which need half the passes and memory of autograd.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def working_precision(x: Tensor) -> Tensor:
    """Convert half precision to float32, and leave other floating point types as they are.

    A subclass of `torch.Tensor`, such as MONAI's ``MetaTensor``, becomes a plain tensor: PyTorch forbids to
    change the views in place that a subclass makes within the functions of this package.

    Raises:
        TypeError: when `x` is not floating point.

    Example:
        >>> working_precision(torch.ones(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if not x.is_floating_point():
        raise TypeError(f"expected a floating point tensor, got {x.dtype}")
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript compiles a condition beside this one
        if type(x) is not Tensor:
            x = x.as_subclass(Tensor)
    if x.dtype == torch.float16 or x.dtype == torch.bfloat16:
        return x.float()
    return x


def check_features(x: Tensor) -> None:
    if x.dim() < 3:
        raise ValueError(f"expected features of shape (B, C, *spatial), got {list(x.shape)}")


def check_shape(name: str, value: Tensor, shape: list[int]) -> None:
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


# On a CPU, images of more bytes than this are processed one at a time: the second pass then reads the image
# from the cache, and no array of the size of the batch is needed.
_LARGE = 10**5

# Batch norm's operations take one pass where ours take several. If channels are last, they add up float32
# numbers in sequence; over this number of positions the error stays at a few millionths.
_POSITIONS = 2**12

_SUMS_ALONE = [False, True, True]  # no derivative by the features

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The layout with channels last, by the number of dimensions of a batch."""


def is_large(x: Tensor) -> bool:
    return x[:1].numel() * x.element_size() > _LARGE


def _has_channels_last(x: Tensor) -> bool:
    layout = CHANNELS_LAST.get(x.dim())
    return layout is not None and x.is_contiguous(memory_format=layout) and not x.is_contiguous()


def _blocks(image: Tensor) -> Sequence[Tensor]:
    """Split an image, (1, C, *spatial), into blocks of positions that batch norm adds up precisely."""
    if image.is_contiguous() or image[0, 0].numel() <= _POSITIONS:
        return (image,)
    rows = image.movedim(1, -1).flatten(0, -2)
    return [block.t()[None, :, :, None] for block in rows.split(_POSITIONS)]


def moments_by_image(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each channel of each image, (B, C) each."""
    if x.is_cuda or not is_large(x):
        return plain_moments(x)
    by_image = _batch_norm_moments if _has_channels_last(x) else plain_moments
    means, variances = zip(*map(by_image, x.split(1)), strict=True)
    return torch.cat(means), torch.cat(variances)


def _batch_norm_moments(image: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of an image, (1, C) each, its blocks joined as by Chan et al. (1979)."""
    blocks = _blocks(image)
    statistics = [torch.batch_norm_update_stats(block, None, None, 0.0) for block in blocks]
    if len(statistics) == 1:
        ((mean, variance),) = statistics
        return mean[None], variance[None]
    means, variances = (torch.stack(values) for values in zip(*statistics, strict=True))
    counts = means.new_tensor([[block.shape[2]] for block in blocks])
    share = counts / counts.sum()
    mean = (share * means).sum(dim=0, keepdim=True)
    return mean, (share * (variances + (means - mean).square())).sum(dim=0, keepdim=True)


def spatial_sums(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of a gradient g, and of g x, over each image and channel, (B, C) each.

    Args:
        grad: g, (B, C, *spatial).
        x: features of the same shape.
    """
    if torch.is_grad_enabled() or x.is_cuda or not is_large(x) or not _same_layout(grad, x):
        spatial = list(range(2, x.dim()))
        return grad.sum(dim=spatial), (grad * x).sum(dim=spatial)
    totals, products = zip(*map(_batch_norm_sums, grad.split(1), x.split(1)), strict=True)
    return torch.stack(totals), torch.stack(products)


def _batch_norm_sums(grad: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of an image, (C,) each: the derivatives of a batch norm by its bias and its weight."""
    ones, zeros = image.new_ones(image.shape[1]), image.new_zeros(image.shape[1])
    gradients = [
        torch.ops.aten.native_batch_norm_backward.default(
            *pair, ones, zeros, ones, None, None, False, 0.0, _SUMS_ALONE
        )
        for pair in zip(_blocks(grad), _blocks(image), strict=True)
    ]
    if len(gradients) == 1:
        return gradients[0][2], gradients[0][1]
    _, products, totals = zip(*gradients, strict=True)
    return torch.stack(totals).sum(dim=0), torch.stack(products).sum(dim=0)


def _same_layout(grad: Tensor, x: Tensor) -> bool:
    if grad.dtype != x.dtype:
        return False
    return (grad.is_contiguous() and x.is_contiguous()) or (
        _has_channels_last(grad) and _has_channels_last(x)
    )


def plain_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    # Two passes: several times faster on a CPU than `torch.var_mean`, and as exact.
    spatial = list(range(2, x.dim()))
    mean = x.mean(dim=spatial)
    centred = x - per_channel(mean, x.dim())
    squares = centred.square() if torch.is_grad_enabled() else centred.square_()
    return mean, squares.mean(dim=spatial)


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if x.is_contiguous() and not x.is_cuda:
        # A CPU's `addcmul` is not vectorised along an axis on which an operand is repeated.
        return (x * per_channel(scale, x.dim())).add_(per_channel(shift, x.dim()))
    return torch.addcmul(per_channel(shift, x.dim()), x, per_channel(scale, x.dim()))


class Moments(torch.autograd.Function):
    """Return the argument and its `plain_moments`, with a derivative that takes one pass over it.

    The derivative joins the gradients of all outputs, which saves a pass over the features. The first output
    must have one user only, since the derivative changes its gradient in place.
    """

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x.view_as(x), *moments_by_image(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_mean: Tensor | None, grad_variance: Tensor | None
    ) -> Tensor | None:
        x, mean = ctx.saved_tensors
        if grad_mean is None and grad_variance is None:
            return grad
        # By x, the derivative of the mean is 1/N, of the variance 2 (x - mean) / N.
        voxels = math.prod(x.shape[2:])
        constant = torch.zeros_like(mean) if grad_mean is None else grad_mean / voxels
        if grad_variance is None:
            slope = torch.zeros_like(mean)
        else:
            slope = grad_variance * (2.0 / voxels)
            constant = torch.addcmul(constant, slope, mean, value=-1)
        if grad is None:
            return affine(x, slope, constant)
        slope, constant = per_channel(slope, x.dim()), per_channel(constant, x.dim())
        if torch.is_grad_enabled():
            return grad + torch.addcmul(constant, x, slope)
        return grad.addcmul_(x, slope).add_(constant)


class Affine(torch.autograd.Function):
    """`affine` with a derivative that keeps no second array of the size of its argument."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return affine(x, scale, shift)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        total, product = spatial_sums(grad, x)
        grad_x = grad * per_channel(scale, x.dim()) if ctx.needs_input_grad[0] else None
        return grad_x, product, total


def scale_by_moments(x: Tensor, move: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Scale and shift features by numbers that follow from their moments; shape and dtype of `x`.

    Args:
        x: features, (B, C, *spatial).
        move: returns scale and shift, given mean and population variance, (B, C) each, at least float32.
    """
    work = working_precision(x)
    if torch.compiler.is_compiling():
        return affine(work, *move(*plain_moments(work))).to(x.dtype)
    if not torch.is_grad_enabled():
        return affine(work, *move(*moments_by_image(work))).to(x.dtype)
    view, mean, variance = Moments.apply(work)
    scaled: Tensor = Affine.apply(view, *move(mean, variance)).to(x.dtype)
    return scaled
