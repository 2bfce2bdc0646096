"""The passes over features that the equations share."""

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
