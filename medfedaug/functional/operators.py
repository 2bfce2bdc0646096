"""Operators that each start one kernel on a GPU, for FFA and for norms with interpolated statistics.

A GPU waits for Python where operations are many and small. Each of these operators replaces ten to thirty
operations of PyTorch. `medfedaug.functional.kernels` has them for CUDA, and this module their equations, the
reference of the kernels' tests. On a CPU, and where Triton cannot compile, the layers use PyTorch's
operations; ``benchmarks/plain_operators.py`` has the operators on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from medfedaug.errors import warn
from medfedaug.functional.features import normalising
from medfedaug.functional.passes import (
    affine,
    plain_moments,
    safe_sqrt,
    visible_variance,
    working_precision,
)

_library = torch.library.Library("medfedaug", "DEF")
operators = torch.ops.medfedaug


def has_operators(x: Tensor) -> bool:
    """Return whether layers compute features on this device by the operators."""
    return (
        _compiles_on(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )


@cache
def _compiles_on(device: str) -> bool:
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


_ADAPTER = "Tensor hidden_weight, Tensor hidden_bias, Tensor out_weight, Tensor out_bias, Tensor? z"
_FEDERATION = "Tensor global_mean, Tensor global_var"
_SCHEMAS = (
    # Mean and population variance of each image and channel, (2, B, C)
    "moments(Tensor x) -> Tensor",
    # Sums of g and of g (x - mean) over each image and channel, (2, B, C)
    "gradient_sums(Tensor grad, Tensor x, Tensor moments) -> Tensor",
    # `moved` and, if the draw makes it active, an update of running statistics and counts (Eq. 5)
    "augment(Tensor x, Tensor moments, Tensor draws, Tensor gamma_mean, Tensor gamma_std, "
    "Tensor(a!) running_mean, Tensor(b!) running_std, Tensor(c!) batches, Tensor(d!) negatives, "
    "Tensor(e!) sampled, float eps, float share, float threshold, float weight, float fixed) -> Tensor",
    # Derivative of `augment` by the features, their moments included
    "augment_backward(Tensor grad, Tensor x, Tensor moments, Tensor sums, Tensor draws, Tensor gamma_mean, "
    "Tensor gamma_std, float eps, float threshold, float weight, float fixed) -> Tensor",
    # α of each image, (B, 1), and G's hidden layer, (B, H), for the derivative
    f"adapted_share(Tensor moments, {_FEDERATION}, {_ADAPTER}, float eps) -> (Tensor, Tensor)",
    # Derivatives by μ and σ of each image through α, (2, B, C), and by the parameters of G
    "adapted_share_backward(Tensor x, Tensor moments, Tensor sums, Tensor share, Tensor hidden, "
    f"{_FEDERATION}, Tensor? weight, {_ADAPTER}, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # `interpolated`; the leading images update the running statistics as in batch norm
    f"interpolate(Tensor x, Tensor moments, Tensor share, {_FEDERATION}, Tensor? weight, Tensor? bias, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, float eps, float floor, float momentum, int plain) "
    "-> Tensor",
    # `interpolate` with the `adapted_share`: the features, α and the hidden layer
    f"interpolate_adapted(Tensor x, Tensor moments, {_FEDERATION}, Tensor? weight, Tensor? bias, {_ADAPTER}, "
    "float eps) -> (Tensor, Tensor, Tensor)",
    # Derivatives of `interpolate` by features, weight and bias; adds `pull`, (2, B, C), to the derivatives by
    # each image's mean and deviation
    f"interpolate_backward(Tensor grad, Tensor x, Tensor moments, Tensor sums, Tensor share, {_FEDERATION}, "
    "Tensor? weight, Tensor? pull, float eps, float floor, int plain) -> (Tensor, Tensor, Tensor)",
)


def _start(name: str, *args: Any) -> Any:
    from medfedaug.functional import kernels

    with torch.cuda.device_of(args[0]):
        return getattr(kernels, name)(*args)


for _schema in _SCHEMAS:
    _library.impl(_library.define(_schema), partial(_start, _schema.partition("(")[0]), "CUDA")


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
    """Return the features, the statistics and the new deviations of FedFA+ Eq. 2, 4 and 8 to 10.

    Args:
        x: features, (B, C, *spatial).
        moments: of `moments`.
        draws: standard normal, (2 B C + 1,): the noise of means, of deviations, and one number.
        gammas: γ of the mean and of the deviation, (C,) each.
        eps: added to the variance.
        threshold: the features move if the last draw is below it.
        weight: 1; 0 leaves γ out.
        fixed: the spread of the noise; negative for the spread in the batch.
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


class AugmentAtOnce(torch.autograd.Function):
    """`moved` by the operators; buffers and settings as of `augment`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, draws: Tensor, gammas: Any, buffers: Any, share: float, *settings: Any
    ) -> Tensor:
        moments = operators.moments(x)
        eps, *rest = settings
        out: Tensor = operators.augment(x, moments, draws, *gammas, *buffers, eps, share, *rest)
        ctx.save_for_backward(x, moments, draws, *gammas)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, moments, draws, *gammas = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative needs the graph of the plain equations
            out = moved(x, _moments(x), draws, gammas, *ctx.settings)[0]
            (grad_x,) = torch.autograd.grad(out, x, grad, create_graph=True)
        else:
            sums = operators.gradient_sums(grad, x, moments)
            grad_x = operators.augment_backward(grad, x, moments, sums, draws, *gammas, *ctx.settings)
        return grad_x, *[None] * (4 + len(ctx.settings))


def instance_share(
    mean_difference: Tensor,
    std_difference: Tensor,
    hidden_weight: Tensor,
    hidden_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    z: Tensor | None = None,
) -> Tensor:
    """α of each image (FedFD-A Eq. 7), (B, 1).

    ::

        α = clamp(z δ + ε, 0, 1),   [δ; ε] = G([μᵢ − μ_G; σᵢ − σ_G])

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
    # A network in half precision has rounded weights, and statistics in float32.
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
    """Return the normalised features (FedFD Eq. 2, FedFD-A Eq. 6) and the plain batch's mean and variance.

    Args:
        x: features, (B, C, *spatial).
        moments: of `moments`.
        share: of each image's statistics, (C,) or (B, 1).
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


_FEW_WEIGHTS = 2**13
"""Number of weights up to which every program of a pass computes the adapter, instead of another kernel."""


class InterpolateAtOnce(torch.autograd.Function):
    """`interpolated` by the operators, with shares from an argument or from an adapter.

    Args:
        x: features, (B, C, *spatial).
        weight: (C,).
        bias: (C,).
        share: (C,) or (B, 1); ``None`` with an adapter.
        federation: mean and variance, (C,) each.
        running: running mean and variance, which leading images update; or ``None`` twice.
        scalars: eps, floor, momentum and the number of leading images, as of `interpolate`.
        z: of the adapter.
        adapter: its four parameters, or none.
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
        moments = operators.moments(x)
        out: Tensor
        if adapter and adapter[0].numel() <= _FEW_WEIGHTS:
            out, share, hidden = operators.interpolate_adapted(
                x, moments, *federation, weight, bias, *adapter, z, eps
            )
        else:
            if adapter:
                share, hidden = operators.adapted_share(moments, *federation, *adapter, z, eps)
            out = operators.interpolate(x, moments, share, *federation, weight, bias, *running, *scalars)
        ctx.save_for_backward(x, moments, share, hidden, weight, bias, *federation, z, *adapter)
        ctx.settings = eps, floor, plain
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, moments, share, hidden, weight, _, mean, variance, z, *adapter = ctx.saved_tensors
        eps, floor, plain = ctx.settings
        if torch.is_grad_enabled():
            return _double_backward(ctx, grad)
        sums, pull, grad_adapter = operators.gradient_sums(grad, x, moments), None, [None] * len(adapter)
        if adapter:
            pull, *grad_adapter = operators.adapted_share_backward(
                x, moments, sums, share, hidden, mean, variance, weight, *adapter, z, eps
            )
        grad_x = grad_weight = grad_bias = None
        if any(ctx.needs_input_grad[:3]):
            grad_x, grad_weight, grad_bias = operators.interpolate_backward(
                grad, x, moments, sums, share, mean, variance, weight, pull, eps, floor, plain
            )
        grads = grad_x, *((grad_weight, grad_bias) if weight is not None else (None, None))
        return *grads, *[None] * 5, *grad_adapter


def _double_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate the plain equations, so that the derivative has a derivative."""
    x, _, share, _, weight, bias, mean, variance, z, *adapter = ctx.saved_tensors
    eps, floor, plain = ctx.settings
    moments = _moments(x)
    if adapter:
        share = _adapted(moments, (mean, variance), (*adapter, z), eps)
    out = interpolated(x, moments, share, (mean, variance), weight, bias, eps, floor, plain)[0]
    inputs = [x, weight, bias, *adapter]
    needed = [index for index, value in enumerate(inputs) if value is not None and value.requires_grad]
    grads: list[Tensor | None] = [None] * len(inputs)
    leaves = [inputs[index] for index in needed]
    for index, value in zip(needed, torch.autograd.grad(out, leaves, grad, create_graph=True), strict=True):
        grads[index] = value
    return *grads[:3], *[None] * 5, *grads[3:]


def _moments(x: Tensor) -> Tensor:
    return torch.stack(plain_moments(working_precision(x)))
