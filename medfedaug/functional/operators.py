"""Operators that each start one kernel on a GPU, for FFA and for norms with interpolated statistics.

A GPU waits for Python where operations are many and small. Each of these operators does what takes ten to
thirty operations of PyTorch. `medfedaug.functional.kernels` has them for CUDA; here are their plain versions,
which the kernels are tested against. Elsewhere, and where Triton cannot compile, the layers use PyTorch's
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from medfedaug.errors import warn
from medfedaug.functional.features import normalising
from medfedaug.functional.passes import (
    affine,
    per_channel,
    plain_moments,
    safe_sqrt,
    visible_variance,
    working_precision,
)

_library = torch.library.Library("medfedaug", "DEF")
operators = torch.ops.medfedaug


def has_operators(x: Tensor) -> bool:
    """Return whether the operators are the way to compute for features on this device."""
    return (
        _work_on(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )


@cache
def _work_on(device: str) -> bool:
    """Start the smallest kernel once: Triton needs a C compiler and a driver that fit."""
    if device != "cuda":
        return False
    try:
        from medfedaug.functional import kernels

        kernels.moments(torch.ones(1, 1, 1, device=device))
    except Exception as error:  # of Triton, the compiler or the driver, of many kinds
        warn(
            "FFA layers and interpolated norms use many small operations on this GPU",
            hint=f"Triton does not work here: {str(error).partition(chr(10))[0]}",
        )
        return False
    return True


def _operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(plain: Callable[..., Any]) -> Callable[..., Any]:
        name = plain.__name__

        def on_gpu(*args: Any) -> Any:
            from medfedaug.functional import kernels

            with torch.cuda.device_of(args[0]):
                return getattr(kernels, name)(*args)

        _library.define(name + schema)
        _library.impl(name, plain, "CPU")
        _library.impl(name, on_gpu, "CUDA")
        return plain

    return register


@_operator("(Tensor x) -> Tensor")
def moments(x: Tensor) -> Tensor:
    """Mean and population variance of each image and channel, (2, B, C)."""
    return _moments(x)


@_operator("(Tensor grad, Tensor x, Tensor moments) -> Tensor")
def gradient_sums(grad: Tensor, x: Tensor, moments: Tensor) -> Tensor:
    """The sums of g and of g (x - mean) over each image and channel, (2, B, C)."""
    spatial = list(range(2, x.dim()))
    grad, beside = working_precision(grad), working_precision(x) - per_channel(moments[0], x.dim())
    return torch.stack((grad.sum(dim=spatial), (grad * beside).sum(dim=spatial)))


def moved(
    x: Tensor,
    moments: Tensor,
    draws: Tensor,
    gammas: Sequence[Tensor],
    eps: float,
    threshold: float,
    weight: float,
    fixed: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """FedFA+ Eq. 2, 4 and 8 to 10: the features, the statistics and the new deviations.

    Args:
        x: features, (B, C, *spatial).
        moments: of `moments`.
        draws: standard normal, (2 B C + 1,): the noise of means, of deviations, and one number.
        gammas: γ of the mean and of the deviation, (C,) each.
        eps: added to the variance.
        threshold: the features move where the last draw is below it.
        weight: 1; 0 leaves γ out.
        fixed: the spread of the noise; negative where the batch decides.
    """
    mean, variance = moments
    variance = visible_variance(mean, variance)
    std = safe_sqrt(variance + eps)
    statistics = torch.stack((mean, std))
    gain = 1.0 + weight * torch.stack(tuple(gammas)).to(mean.dtype)[:, None]
    spread = safe_sqrt(gain * statistics.var(dim=1, unbiased=False, keepdim=True))
    if fixed >= 0:
        spread = torch.full_like(spread, fixed)
    noise = draws[:-1].view_as(statistics) * spread
    scale = noise[1] / torch.where(std > 0, std, torch.inf)
    shift = noise[0] - mean * scale
    work = working_precision(x)
    out = torch.where(draws[-1] < threshold, affine(work, 1.0 + scale, shift), work)
    return out.to(x.dtype), statistics, std + noise[1]


@_operator(
    "(Tensor x, Tensor moments, Tensor draws, Tensor gamma_mean, Tensor gamma_std, Tensor(a!) running_mean, "
    "Tensor(b!) running_std, Tensor(c!) batches, Tensor(d!) negatives, Tensor(e!) sampled, float eps, "
    "float share, float threshold, float weight, float fixed) -> Tensor"
)
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
    """`moved`, with the running statistics and counts (Eq. 5); the draw decides over both."""
    out, statistics, std = moved(x, moments, draws, (gamma_mean, gamma_std), eps, threshold, weight, fixed)
    if bool(draws[-1] < threshold):
        for running, value in zip((running_mean, running_std), statistics.mean(dim=1), strict=True):
            running.lerp_(value.to(running.dtype), share)
        batches.add_(1)
        negatives.add_((std < 0).sum())
        sampled.add_(std.numel())
    return out


@_operator(
    "(Tensor grad, Tensor x, Tensor moments, Tensor sums, Tensor draws, Tensor gamma_mean, Tensor gamma_std, "
    "float eps, float threshold, float weight, float fixed) -> Tensor"
)
def augment_backward(
    grad: Tensor, x: Tensor, moments: Tensor, sums: Tensor, draws: Tensor, *settings: Any
) -> Tensor:
    """The derivative of `augment` by the features, their moments included."""
    gammas, settings = settings[:2], settings[2:]
    return _derivatives(lambda x: moved(x, _moments(x), draws, gammas, *settings)[0], grad, x)[0]


class AugmentAtOnce(torch.autograd.Function):
    """`moved` by the operators; buffers and settings as of `augment`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, draws: Tensor, gammas: Any, buffers: Any, share: float, *settings: Any
    ) -> Tensor:
        found = operators.moments(x)
        eps, *others = settings
        out: Tensor = operators.augment(x, found, draws, *gammas, *buffers, eps, share, *others)
        ctx.save_for_backward(x, found, draws, *gammas)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, found, draws, *gammas = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative has to see where the numbers come from
            out = moved(x, _moments(x), draws, gammas, *ctx.settings)[0]
            (by_x,) = torch.autograd.grad(out, x, grad, create_graph=True)
        else:
            sums = operators.gradient_sums(grad, x, found)
            by_x = operators.augment_backward(grad, x, found, sums, draws, *gammas, *ctx.settings)
        return by_x, *[None] * (4 + len(ctx.settings))


def instance_share(
    mean_difference: Tensor,
    std_difference: Tensor,
    hidden_weight: Tensor,
    hidden_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    z: Tensor | None = None,
) -> Tensor:
    r"""α of each image (FedFD-A Eq. 7), (B, 1).

    .. math:: \alpha = \mathrm{clamp}(z \delta + \epsilon, 0, 1), \qquad
              [\delta; \epsilon] = G([\mu_i - \mu_G;\ \sigma_i - \sigma_G])

    Args:
        mean_difference: (B, C).
        std_difference: (B, C).
        hidden_weight: of G's first layer, (H, 2 C).
        hidden_bias: (H,).
        out_weight: of its second layer, (2, H).
        out_bias: (2,).
        z: (B, 1); without, z = 0, its mean.
    """
    differences = torch.cat([mean_difference, std_difference], dim=1)
    # Of a network in half precision, the weights are rounded and the statistics are not.
    weights = (hidden_weight, hidden_bias, out_weight, out_bias)
    weight, bias, out_weight, out_bias = (value.to(differences) for value in weights)
    hidden = torch.nn.functional.linear(differences, weight, bias).relu()
    out = torch.nn.functional.linear(hidden, out_weight, out_bias).to(differences)
    delta, epsilon = out.split(1, dim=1)
    result: Tensor = (epsilon if z is None else z * delta + epsilon).clamp(0.0, 1.0)
    return result


def interpolated(
    x: Tensor,
    moments: Tensor,
    share: Tensor,
    federation: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    floor: float,
    plain: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """FedFD Eq. 2, FedFD-A Eq. 6: the features, normalised, and the first images' mean and variance.

    Args:
        x: features, (B, C, *spatial).
        moments: of `moments`.
        share: of each image's own statistics, (C,) or (B, 1).
        federation: its mean and variance, (C,) each.
        weight: (C,).
        bias: (C,).
        eps: added to variances.
        floor: the smallest deviation.
        plain: the number of leading images that plain batch norm normalises, as a batch.
    """
    (mean, variance), (global_mean, global_var) = moments, (value.to(moments) for value in federation)
    centre = torch.lerp(global_mean, mean, share.to(mean))
    std = torch.lerp((global_var + eps).sqrt(), (variance + eps).sqrt(), share.to(mean)).clamp_min(floor)
    of_all = mean[:plain].mean(dim=0)
    variance_of_all = (variance[:plain] + (mean[:plain] - of_all).square()).mean(dim=0)
    if plain:
        centre = torch.cat([of_all.expand(plain, -1), centre[plain:]])
        std = torch.cat([(variance_of_all + eps).sqrt().expand(plain, -1), std[plain:]])
    out = affine(working_precision(x), *normalising(centre, std, weight, bias)).to(x.dtype)
    return out, of_all, variance_of_all


def _adapted(moments: Tensor, federation: Sequence[Tensor], adapter: Sequence[Any], eps: float) -> Tensor:
    mean, variance = (value.to(moments) for value in federation)
    return instance_share(moments[0] - mean, (moments[1] + eps).sqrt() - (variance + eps).sqrt(), *adapter)


_ADAPTER = "Tensor hidden_weight, Tensor hidden_bias, Tensor out_weight, Tensor out_bias, Tensor? z"
_FEDERATION = "Tensor global_mean, Tensor global_var"


@_operator(f"(Tensor moments, {_FEDERATION}, {_ADAPTER}, float eps) -> (Tensor, Tensor)")
def adapted_share(
    moments: Tensor, global_mean: Tensor, global_var: Tensor, *adapter_and_eps: Any
) -> tuple[Tensor, Tensor]:
    """α of each image, (B, 1), and G's hidden layer, (B, H), which `adapted_share_backward` needs."""
    *adapter, eps = adapter_and_eps
    share = _adapted(moments, (global_mean, global_var), adapter, eps)
    return share, share.new_empty(len(share), len(adapter[1]))


@_operator(
    f"(Tensor x, Tensor moments, Tensor sums, Tensor share, Tensor hidden, {_FEDERATION}, Tensor? weight, "
    f"{_ADAPTER}, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
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
    """The derivatives by μ and σ of each image by way of α, (2, B, C), and by the parameters of G."""
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


@_operator(
    f"(Tensor x, Tensor moments, Tensor share, {_FEDERATION}, Tensor? weight, Tensor? bias, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, float eps, float floor, float momentum, int plain) "
    "-> Tensor"
)
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
    """`interpolated`; the leading images move the running statistics as in batch norm."""
    federation = global_mean, global_var
    out, mean, variance = interpolated(x, moments, share, federation, weight, bias, eps, floor, plain)
    if plain and running_mean is not None and running_var is not None:
        number = plain * x.shape[2:].numel()
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * (number / (number - 1))).to(running_var.dtype), momentum)
    return out


@_operator(
    f"(Tensor x, Tensor moments, {_FEDERATION}, Tensor? weight, Tensor? bias, {_ADAPTER}, float eps) "
    "-> (Tensor, Tensor, Tensor)"
)
def interpolate_adapted(
    x: Tensor,
    moments: Tensor,
    global_mean: Tensor,
    global_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *adapter_and_eps: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`adapted_share` and `interpolate` with it: the features, α and the hidden layer."""
    share, hidden = adapted_share(moments, global_mean, global_var, *adapter_and_eps)
    federation, eps = (global_mean, global_var), adapter_and_eps[-1]
    out, _, _ = interpolated(x, moments, share, federation, weight, bias, eps, 0.0, 0)
    return out, share, hidden


@_operator(
    f"(Tensor grad, Tensor x, Tensor moments, Tensor sums, Tensor share, {_FEDERATION}, Tensor? weight, "
    "Tensor? pull, float eps, float floor, int plain) -> (Tensor, Tensor, Tensor)"
)
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
    """The derivatives of `interpolate` by the features, weight and bias.

    Args:
        grad: by the result.
        x: see `interpolated`, as of the others.
        moments: of `moments`.
        sums: of `gradient_sums`.
        share: (C,) or (B, 1).
        global_mean: (C,).
        global_var: (C,).
        weight: (C,).
        pull: derivatives by each image's mean and deviation that come on top, (2, B, C).
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


_FEW_WEIGHTS = 2**13
"""Weights of an adapter that every program of a pass reads again rather than another kernel once."""


class InterpolateAtOnce(torch.autograd.Function):
    """`interpolated` by the operators, with shares that are given or of an adapter.

    Args:
        x: features, (B, C, *spatial).
        weight: (C,).
        bias: (C,).
        share: (C,) or (B, 1); ``None`` with an adapter.
        federation: mean and variance, (C,) each.
        running: running mean and variance, which leading images move; or ``None`` twice.
        scalars: eps, floor, momentum and the number of leading images, as of `interpolate`.
        z: of the adapter.
        adapter: its four parameters, or nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        share: Tensor | None,
        federation: tuple[Tensor, Tensor],
        running: tuple[Tensor | None, Tensor | None],
        scalars: tuple[float, float, float, int],
        z: Tensor | None,
        *adapter: Tensor,
    ) -> Tensor:
        (eps, floor, _, plain), hidden = scalars, None
        found = operators.moments(x)
        out: Tensor
        if adapter and adapter[0].numel() <= _FEW_WEIGHTS:
            out, share, hidden = operators.interpolate_adapted(
                x, found, *federation, weight, bias, *adapter, z, eps
            )
        else:
            if adapter:
                share, hidden = operators.adapted_share(found, *federation, *adapter, z, eps)
            out = operators.interpolate(x, found, share, *federation, weight, bias, *running, *scalars)
        ctx.save_for_backward(x, found, share, hidden, weight, bias, *federation, z, *adapter)
        ctx.settings = eps, floor, plain
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, found, share, hidden, weight, _, mean, variance, z, *adapter = ctx.saved_tensors
        eps, floor, plain = ctx.settings
        if torch.is_grad_enabled():
            return _second(ctx, grad)
        sums, pull, of_adapter = operators.gradient_sums(grad, x, found), None, [None] * len(adapter)
        if adapter:
            pull, *of_adapter = operators.adapted_share_backward(
                x, found, sums, share, hidden, mean, variance, weight, *adapter, z, eps
            )
        by_x = by_weight = by_bias = None
        if any(ctx.needs_input_grad[:3]):
            by_x, by_weight, by_bias = operators.interpolate_backward(
                grad, x, found, sums, share, mean, variance, weight, pull, eps, floor, plain
            )
        own = by_x, *((by_weight, by_bias) if weight is not None else (None, None))
        return *own, *[None] * 5, *of_adapter


def _second(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate the plain equations, so that the derivative has one of its own."""
    x, _, share, _, weight, bias, mean, variance, z, *adapter = ctx.saved_tensors
    eps, floor, plain = ctx.settings
    found = _moments(x)
    if adapter:
        share = _adapted(found, (mean, variance), (*adapter, z), eps)
    out = interpolated(x, found, share, (mean, variance), weight, bias, eps, floor, plain)[0]
    inputs = [x, weight, bias, *adapter]
    needed = [one for one in inputs if one is not None and one.requires_grad]
    by = iter(torch.autograd.grad(out, needed, grad, create_graph=True))
    own, others = [next(by) if one is not None and one.requires_grad else None for one in inputs], [None] * 5
    return *own[:3], *others, *own[3:]


def _moments(x: Tensor) -> Tensor:
    return torch.stack(plain_moments(working_precision(x)))


def _derivatives(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad)
