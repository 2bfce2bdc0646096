"""Plain versions of the operators of `medfedaug.functional.operators`, for a CPU.

With this module, layers on a CPU can take the path of a GPU: the tests compare the two paths, and
`pretended_gpu.py` counts an operator as one operation. The package uses its operators on a GPU only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from medfedaug.functional.operators import _adapted, _moments, instance_share, interpolated, moved
from medfedaug.functional.passes import affine, per_channel, working_precision


def moments(x: Tensor) -> Tensor:
    """Return mean and population variance of each image and channel, (2, B, C)."""
    return _moments(x)


def gradient_sums(grad: Tensor, x: Tensor, moments: Tensor) -> Tensor:
    """Return the sums of g and of g (x - mean) over each image and channel, (2, B, C)."""
    spatial = list(range(2, x.dim()))
    grad, centred = working_precision(grad), working_precision(x) - per_channel(moments[0], x.dim())
    return torch.stack((grad.sum(dim=spatial), (grad * centred).sum(dim=spatial)))


def augment(
    x: Tensor,
    moments: Tensor,
    draws: Tensor,
    gamma_mean: Tensor,
    gamma_std: Tensor,
    running_mean: Tensor,
    running_std: Tensor,
    batches: Tensor,
    negatives: Tensor,
    sampled: Tensor,
    eps: float,
    share: float,
    threshold: float,
    weight: float,
    fixed: float,
) -> Tensor:
    """Compute `moved`, with the running statistics and counts (Eq. 5); the draw decides both."""
    out, statistics, std = moved(x, moments, draws, (gamma_mean, gamma_std), eps, threshold, weight, fixed)
    if bool(draws[-1] < threshold):
        for running, value in zip((running_mean, running_std), statistics.mean(dim=1), strict=True):
            running.lerp_(value.to(running.dtype), share)
        batches.add_(1)
        negatives.add_((std < 0).sum())
        sampled.add_(std.numel())
    return out


def augment_backward(
    grad: Tensor, x: Tensor, moments: Tensor, sums: Tensor, draws: Tensor, *settings: Any
) -> Tensor:
    """Return the derivative of `augment` by the features, their moments included."""
    gammas, settings = settings[:2], settings[2:]
    return _derivatives(lambda x: moved(x, _moments(x), draws, gammas, *settings)[0], grad, x)[0]


def adapted_share(
    moments: Tensor, global_mean: Tensor, global_var: Tensor, *adapter_and_eps: Any
) -> tuple[Tensor, Tensor]:
    """Return α of each image, (B, 1), and G's hidden layer, (B, H), for `adapted_share_backward`."""
    *adapter, eps = adapter_and_eps
    share = _adapted(moments, (global_mean, global_var), adapter, eps)
    return share, share.new_empty(len(share), len(adapter[1]))


def adapted_share_backward(
    x: Tensor,
    moments: Tensor,
    sums: Tensor,
    share: Tensor,
    hidden: Tensor,
    global_mean: Tensor,
    global_var: Tensor,
    weight: Tensor | None,
    *adapter_and_eps: Any,
) -> tuple[Tensor, ...]:
    """Return the derivatives by μ and σ of each image through α, (2, B, C), and by G's parameters."""
    *parameters, z, eps = adapter_and_eps
    mean, std = moments[0], (moments[1] + eps).sqrt()
    global_mean, global_std = global_mean.to(mean), (global_var.to(mean) + eps).sqrt()
    centre, deviation = torch.lerp(global_mean, mean, share), torch.lerp(global_std, std, share)
    scale = (1.0 if weight is None else weight) / deviation
    along = sums[0] * (mean - global_mean)
    along = along + (sums[1] + sums[0] * (mean - centre)) / deviation * (std - global_std)

    def function(mean: Tensor, std: Tensor, *parameters: Any) -> Tensor:
        return instance_share(mean - global_mean, std - global_std, *(*parameters, z))

    by_share = -(scale * along).sum(dim=1, keepdim=True)
    by_mean, by_std, *others = _derivatives(function, by_share, mean, std, *parameters)
    return torch.stack((by_mean, by_std)), *others


def interpolate(
    x: Tensor,
    moments: Tensor,
    share: Tensor,
    global_mean: Tensor,
    global_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    floor: float,
    momentum: float,
    plain: int,
) -> Tensor:
    """Compute `interpolated`; the leading images move the running statistics as in batch norm."""
    federation = global_mean, global_var
    out, mean, variance = interpolated(x, moments, share, federation, weight, bias, eps, floor, plain)
    if plain and running_mean is not None and running_var is not None:
        number = plain * x.shape[2:].numel()
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * (number / (number - 1))).to(running_var.dtype), momentum)
    return out


def interpolate_adapted(
    x: Tensor,
    moments: Tensor,
    global_mean: Tensor,
    global_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *adapter_and_eps: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `adapted_share` and `interpolate`: the features, α and the hidden layer."""
    share, hidden = adapted_share(moments, global_mean, global_var, *adapter_and_eps)
    federation, eps = (global_mean, global_var), adapter_and_eps[-1]
    out, _, _ = interpolated(x, moments, share, federation, weight, bias, eps, 0.0, 0)
    return out, share, hidden


def interpolate_backward(
    grad: Tensor,
    x: Tensor,
    moments: Tensor,
    sums: Tensor,
    share: Tensor,
    global_mean: Tensor,
    global_var: Tensor,
    weight: Tensor | None,
    pull: Tensor | None,
    eps: float,
    floor: float,
    plain: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives of `interpolate` by the features, weight and bias.

    Args:
        grad: by the result.
        x: see `interpolated`, as of the others.
        moments: of `moments`.
        sums: of `gradient_sums`.
        share: (C,) or (B, 1).
        global_mean: (C,).
        global_var: (C,).
        weight: (C,).
        pull: further derivatives by each image's mean and deviation, (2, B, C).
        eps: added to variances.
        floor: the smallest deviation.
        plain: the number of leading images that are a batch.
    """
    one = torch.ones_like(moments[0, 0]) if weight is None else weight

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        federation = global_mean, global_var
        out = interpolated(x, _moments(x), share, federation, weight, bias, eps, floor, plain)[0]
        return working_precision(out)

    by_x, by_weight, by_bias = _derivatives(
        function, working_precision(grad), working_precision(x), one, torch.zeros_like(one)
    )
    if pull is not None:
        std = (moments[1] + eps).sqrt()
        slope = pull[1] / std / x.shape[2:].numel()
        by_x = by_x + affine(working_precision(x), slope, pull[0] / x.shape[2:].numel() - slope * moments[0])
    return by_x.to(x.dtype), by_weight, by_bias


def _derivatives(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad)


_LIBRARY = torch.library.Library("medfedaug", "IMPL", "CPU")
for _plain in (
    *(moments, gradient_sums, augment, augment_backward, adapted_share, adapted_share_backward),
    *(interpolate, interpolate_adapted, interpolate_backward),
):
    _LIBRARY.impl(_plain.__name__, _plain)
