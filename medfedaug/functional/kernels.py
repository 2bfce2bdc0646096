"""The operators of `medfedaug.functional.operators` as Triton kernels, one launch each.

Arguments and results equal the operators'; their plain versions are the reference. A program computes
a block of channels of one image. Every program computes the numbers by image and channel that it needs from
the whole batch: this costs less than another launch. With ``TRITON_INTERPRET=1`` in the environment the
kernels run on a CPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of kernels, so they must not be postponed to strings.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from medfedaug.functional.passes import resolution

_TILE = 1024
"""Number of elements that a program holds at a time."""
_TILES = 8
"""Number of tiles that a program of an elementwise pass computes in turn."""


def _strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return the features and three strides; copy features whose positions are not evenly spaced."""
    sizes, strides = x.shape[2:], x.stride()[2:]
    even = all(s == n * t for s, n, t in zip(strides, sizes[1:], strides[1:], strict=False))
    x = x if even else x.contiguous()
    return x, x.stride(0), x.stride(1), x.stride(-1)


def _precision(x: Tensor) -> tl.dtype:
    """The type in which a kernel computes."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _blocks(x: Tensor, step: int) -> dict[str, Any]:
    """The constants of a kernel: blocks of channels and positions, the batch as a power of two."""
    images, channels, positions = len(x), x.shape[1], x.shape[2:].numel()
    columns = min(triton.next_power_of_2(positions), _TILE if step == 1 else 64)
    rows = min(triton.next_power_of_2(channels), max(1, _TILE // columns))
    return {"ACC": _precision(x), "ROWS": rows, "COLUMNS": columns, "IMAGES": triton.next_power_of_2(images)}


def _grid(x: Tensor, blocks: dict[str, Any]) -> tuple[int, int, int]:
    span = _TILES * blocks["COLUMNS"]
    return triton.cdiv(x.shape[2:].numel(), span), triton.cdiv(x.shape[1], blocks["ROWS"]), len(x)


@triton.jit
def _tile(pointer, image, c, n, C, N, xb, xc, xn, ACC: tl.constexpr):
    inside = (c < C)[:, None] & (n < N)[None, :]
    at = image.to(tl.int64) * xb + c.to(tl.int64)[:, None] * xc + n.to(tl.int64)[None, :] * xn
    return tl.load(pointer + at, mask=inside, other=0.0).to(ACC)


@triton.jit
def _write(
    g, x, out, scale, slope, shift, image, c, C, N, gb, gc, gn, xb, xc, xn, ob, oc, on,
    BOTH: tl.constexpr, ACC: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write g times its scale plus the shift; with BOTH, x times its slope is added."""
    first = tl.program_id(0) * COLUMNS * TILES
    for start in range(first, tl.minimum(first + COLUMNS * TILES, N), COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        value = _tile(g, image, c, n, C, N, gb, gc, gn, ACC) * scale[:, None] + shift[:, None]
        if BOTH:
            value += _tile(x, image, c, n, C, N, xb, xc, xn, ACC) * slope[:, None]
        at = image.to(tl.int64) * ob + c.to(tl.int64)[:, None] * oc + n.to(tl.int64)[None, :] * on
        tl.store(out + at, value.to(out.dtype.element_ty), mask=(c < C)[:, None] & (n < N)[None, :])


@triton.jit
def _batch(values, c, images, B, C):
    """Return the numbers of a block of channels for all images, (ROWS, IMAGES); 0 outside."""
    valid = (c < C)[:, None] & (images < B)[None, :]
    return tl.load(values + images[None, :] * C + c[:, None], mask=valid, other=0.0)


@triton.jit
def _row(values, c, C, ACC: tl.constexpr):
    return tl.load(values + c, mask=c < C, other=0.0).to(ACC)


@triton.jit
def _column(values, images, image):
    """Return the column of one image."""
    return tl.sum(tl.where((images == image)[None, :], values, 0.0), 1)


@triton.jit
def _moments(
    x, out, B, C, N, xb, xc, xn,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    """Compute moments in one read; join the tiles' moments as Chan et al. (1979)."""
    image = tl.program_id(1)
    c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.zeros([ROWS], ACC)
    squares = tl.zeros([ROWS], ACC)
    for start in range(0, N, COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        tile = _tile(x, image, c, n, C, N, xb, xc, xn, ACC)
        size = tl.minimum(COLUMNS, N - start).to(ACC)
        tile_mean = tl.sum(tile, 1) / size
        deviation = tl.where((n < N)[None, :], tile - tile_mean[:, None], 0.0)
        share = size / (start + size)
        delta = tile_mean - mean
        mean += delta * share
        squares += tl.sum(deviation * deviation, 1) + delta * delta * share * start
    at = image * C + c
    tl.store(out + at, mean, mask=c < C)
    tl.store(out + B * C + at, squares / N, mask=c < C)


def moments(x: Tensor) -> Tensor:
    x, *strides = _strides(x)
    out = x.new_empty(2, *x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
    blocks = _blocks(x, strides[2])
    grid = (triton.cdiv(x.shape[1], blocks["ROWS"]), len(x))
    _moments[grid](x, out, *x.shape[:2], x.shape[2:].numel(), *strides, **blocks)
    return out


@triton.jit
def _sums(
    g, x, moments, out, B, C, N, gb, gc, gn, xb, xc, xn,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1)
    c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = image * C + c
    mean = tl.load(moments + at, mask=c < C, other=0.0)
    total = tl.zeros([ROWS], ACC)
    product = tl.zeros([ROWS], ACC)
    for start in range(0, N, COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        grad = _tile(g, image, c, n, C, N, gb, gc, gn, ACC)
        total += tl.sum(grad, 1)
        product += tl.sum(grad * (_tile(x, image, c, n, C, N, xb, xc, xn, ACC) - mean[:, None]), 1)
    tl.store(out + at, total, mask=c < C)
    tl.store(out + B * C + at, product, mask=c < C)


def gradient_sums(grad: Tensor, x: Tensor, moments: Tensor) -> Tensor:
    (x, *strides), (grad, *steps) = _strides(x), _strides(grad)
    out, blocks = torch.empty_like(moments), _blocks(x, strides[2])
    grid = (triton.cdiv(x.shape[1], blocks["ROWS"]), len(x))
    _sums[grid](grad, x, moments, out, *x.shape[:2], x.shape[2:].numel(), *steps, *strides, **blocks)
    return out


@triton.jit
def _spread(values, valid, gamma, c, C, B, WEIGHT: tl.constexpr, FIXED: tl.constexpr):
    """The mean over the batch, the centred values, γ + 1 and the deviation of the noise (Eq. 4 and 8)."""
    mean = tl.sum(values, 1) / B
    centred = tl.where(valid, values - mean[:, None], 0.0)
    gain = 1.0 + WEIGHT * _row(gamma, c, C, values.dtype)
    spread = tl.sqrt(gain * tl.sum(centred * centred, 1) / B)
    if FIXED >= 0:
        spread = tl.zeros_like(spread) + FIXED
    return mean, centred, gain, spread


@triton.jit
def _deviations(mean, variance, valid, EPS: tl.constexpr, RESOLUTION: tl.constexpr):
    """Return σ, its inverse, and a mask of the channels that vary (Eq. 2)."""
    visible = variance > mean * mean * (RESOLUTION * RESOLUTION)
    std = tl.where(valid, tl.sqrt(tl.where(visible, variance, 0.0) + EPS), 0.0)
    return std, tl.where(std > 0, 1.0 / tl.where(std > 0, std, 1.0), 0.0), visible


@triton.jit
def _augment(
    x, out, moments, draws, gamma_mean, gamma_std, running_mean, running_std, batches, negatives, sampled,
    B, C, N, xb, xc, xn, ob, oc, on,
    EPS: tl.constexpr, SHARE: tl.constexpr, THRESHOLD: tl.constexpr, WEIGHT: tl.constexpr,
    FIXED: tl.constexpr, RESOLUTION: tl.constexpr, TILES: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2)
    c = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    images = tl.arange(0, IMAGES)
    valid = (c < C)[:, None] & (images < B)[None, :]
    mean = _batch(moments, c, images, B, C)
    std, inverse, _ = _deviations(mean, _batch(moments + B * C, c, images, B, C), valid, EPS, RESOLUTION)
    mean_of_means, _, _, spread_mean = _spread(mean, valid, gamma_mean, c, C, B, WEIGHT, FIXED)
    mean_of_stds, _, _, spread_std = _spread(std, valid, gamma_std, c, C, B, WEIGHT, FIXED)
    active = tl.load(draws + 2 * B * C) < THRESHOLD
    moved_std = _batch(draws + B * C, c, images, B, C) * spread_std[:, None]
    if (tl.program_id(0) == 0) & (image == 0) & active:
        before = _row(running_mean, c, C, ACC)
        tl.store(running_mean + c, before + SHARE * (mean_of_means - before), mask=c < C)
        before = _row(running_std, c, C, ACC)
        tl.store(running_std + c, before + SHARE * (mean_of_stds - before), mask=c < C)
        tl.atomic_add(negatives, tl.sum(tl.sum(((std + moved_std < 0) & valid).to(tl.int64), 1), 0))
        if tl.program_id(1) == 0:
            tl.store(batches, tl.load(batches) + 1)
            tl.store(sampled, tl.load(sampled) + B * C)
    scale = tl.where(active, _column(moved_std * inverse, images, image), 0.0)
    shift = tl.where(active, _row(draws + image * C, c, C, ACC) * spread_mean, 0.0)
    shift -= _column(mean, images, image) * scale
    _write(
        x, x, out, 1.0 + scale, scale, shift, image, c, C, N, xb, xc, xn, xb, xc, xn, ob, oc, on,
        False, ACC, COLUMNS, TILES,
    )  # fmt: skip


def augment(
    x: Tensor, moments: Tensor, draws: Tensor, gamma_mean: Tensor, gamma_std: Tensor, running_mean: Tensor,
    running_std: Tensor, batches: Tensor, negatives: Tensor, sampled: Tensor, eps: float, share: float,
    threshold: float, weight: float, fixed: float,
) -> Tensor:  # fmt: skip
    x, *strides = _strides(x)
    out, *steps = _strides(torch.empty_like(x))
    blocks = _blocks(x, strides[2])
    buffers = (gamma_mean, gamma_std, running_mean, running_std, batches, negatives, sampled)
    _augment[_grid(x, blocks)](
        x, out, moments, draws, *buffers, *x.shape[:2], x.shape[2:].numel(), *strides, *steps,
        EPS=eps, SHARE=share, THRESHOLD=threshold, WEIGHT=weight, FIXED=fixed,
        RESOLUTION=resolution(x.dtype), TILES=_TILES, **blocks,
    )  # fmt: skip
    return out


@triton.jit
def _augment_backward(
    g, x, out, moments, sums, draws, gamma_mean, gamma_std,
    B, C, N, gb, gc, gn, xb, xc, xn, ob, oc, on,
    EPS: tl.constexpr, THRESHOLD: tl.constexpr, WEIGHT: tl.constexpr, FIXED: tl.constexpr,
    RESOLUTION: tl.constexpr, TILES: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2)
    c = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    images = tl.arange(0, IMAGES)
    valid = (c < C)[:, None] & (images < B)[None, :]
    mean = _batch(moments, c, images, B, C)
    std, inverse, visible = _deviations(
        mean, _batch(moments + B * C, c, images, B, C), valid, EPS, RESOLUTION
    )
    _, centred_mean, gain_mean, spread_mean = _spread(mean, valid, gamma_mean, c, C, B, WEIGHT, FIXED)
    _, centred_std, gain_std, spread_std = _spread(std, valid, gamma_std, c, C, B, WEIGHT, FIXED)
    noise_mean = _batch(draws, c, images, B, C)
    noise_std = _batch(draws + B * C, c, images, B, C)
    by_mean = _batch(sums, c, images, B, C)
    by_std = _batch(sums + B * C, c, images, B, C) * inverse
    # Derivatives by the spreads, and so by the statistics of all images; then by those of this image.
    pull_mean = tl.sum(noise_mean * by_mean, 1) * gain_mean / tl.where(spread_mean > 0, spread_mean, 1.0)
    pull_std = tl.sum(noise_std * by_std, 1) * gain_std / tl.where(spread_std > 0, spread_std, 1.0)
    pull_mean = tl.where(spread_mean > 0, pull_mean, 0.0)
    pull_std = tl.where(spread_std > 0, pull_std, 0.0)
    if FIXED >= 0:
        pull_mean = tl.zeros_like(pull_mean)
        pull_std = tl.zeros_like(pull_std)
    scales = noise_std * spread_std[:, None] * inverse
    statistics_mean = (centred_mean * (pull_mean / B)[:, None] - by_mean * scales) / N
    statistics_std = (centred_std * (pull_std / B)[:, None] - by_std * scales) / N
    slopes = tl.where(visible, statistics_std * inverse, 0.0)
    active = tl.load(draws + 2 * B * C) < THRESHOLD
    scale = tl.where(active, _column(scales, images, image), 0.0)
    slope = tl.where(active, _column(slopes, images, image), 0.0)
    shift = tl.where(active, _column(statistics_mean - slopes * mean, images, image), 0.0)
    _write(
        g, x, out, 1.0 + scale, slope, shift, image, c, C, N, gb, gc, gn, xb, xc, xn, ob, oc, on,
        True, ACC, COLUMNS, TILES,
    )  # fmt: skip


def augment_backward(
    grad: Tensor, x: Tensor, moments: Tensor, sums: Tensor, draws: Tensor, gamma_mean: Tensor,
    gamma_std: Tensor, eps: float, threshold: float, weight: float, fixed: float,
) -> Tensor:  # fmt: skip
    (x, *strides), (grad, *grad_strides) = _strides(x), _strides(grad)
    out, *steps = _strides(torch.empty_like(x))
    blocks = _blocks(x, strides[2])
    _augment_backward[_grid(x, blocks)](
        grad, x, out, moments, sums, draws, gamma_mean, gamma_std,
        *x.shape[:2], x.shape[2:].numel(), *grad_strides, *strides, *steps,
        EPS=eps, THRESHOLD=threshold, WEIGHT=weight, FIXED=fixed,
        RESOLUTION=resolution(x.dtype), TILES=_TILES, **blocks,
    )  # fmt: skip
    return out


@triton.jit
def _interpolated(
    mean, variance, share, global_mean, global_var, c, images, C, PLAIN,
    EPS: tl.constexpr, FLOOR: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return each image's centre and divisor, its own deviation and share, and the plain batch's variance."""
    std = tl.sqrt(variance + EPS)
    other_mean = _row(global_mean, c, C, ACC)[:, None]
    other_std = tl.sqrt(_row(global_var, c, C, ACC) + EPS)[:, None]
    centre = other_mean + share * (mean - other_mean)
    deviation = other_std + share * (std - other_std)
    share_of_std = tl.where(deviation < FLOOR, 0.0, share)
    deviation = tl.where(deviation < FLOOR, FLOOR, deviation)
    # The first images are a batch of plain batch norm.
    plain = (images < PLAIN)[None, :]
    count = tl.maximum(PLAIN, 1)
    centre_of_all = tl.sum(tl.where(plain, mean, 0.0), 1)[:, None] / count
    offset = mean - centre_of_all
    variance_of_all = tl.sum(tl.where(plain, variance + offset * offset, 0.0), 1) / count
    centre = tl.where(plain, centre_of_all, centre)
    deviation = tl.where(plain, tl.sqrt(variance_of_all + EPS)[:, None], deviation)
    return centre, deviation, std, share_of_std, variance_of_all


@triton.jit
def _shares(u, c, images, B, C, ub, uc, ACC: tl.constexpr):
    valid = (c < C)[:, None] & (images < B)[None, :]
    return tl.load(u + images[None, :] * ub + c[:, None] * uc, mask=valid, other=0.0).to(ACC)


@triton.jit
def _differences(
    moments, global_mean, global_var, image, c, B, C, EPS: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """Return the statistics of one image less the federation's; 0 outside."""
    at = moments + image * C
    mean = _row(at, c, C, ACC) - _row(global_mean, c, C, ACC)
    std = tl.sqrt(_row(at + B * C, c, C, ACC) + EPS) - tl.sqrt(_row(global_var, c, C, ACC) + EPS)
    return mean, tl.where(c < C, std, 0.0)


@triton.jit
def _weights(pointer, h, c, H, C, ACC: tl.constexpr):
    inside = (h < H)[:, None] & (c < C)[None, :]
    return tl.load(pointer + h[:, None] * (2 * C) + c[None, :], mask=inside, other=0.0).to(ACC)


@triton.jit
def _raw_share(activations, out_w, out_bias, z, image, h, H, NOISY: tl.constexpr, ACC: tl.constexpr):
    """Return z δ + ε before clamping, and z."""
    noise = tl.load(z + image).to(ACC) if NOISY else 0.0
    delta = tl.sum(_row(out_w, h, H, ACC) * activations, 0) + tl.load(out_bias).to(ACC)
    epsilon = tl.sum(_row(out_w + H, h, H, ACC) * activations, 0) + tl.load(out_bias + 1).to(ACC)
    return noise * delta + epsilon, noise


@triton.jit
def _adapted(
    moments, global_mean, global_var, hidden_w, hidden_bias, out_w, out_bias, z, image, h, B, C, H,
    EPS: tl.constexpr, NOISY: tl.constexpr, ACC: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return α of one image, and the hidden layer."""
    activations = _row(hidden_bias, h, H, ACC)
    for start in range(0, C, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        mean, std = _differences(moments, global_mean, global_var, image, c, B, C, EPS, ACC)
        activations += tl.sum(_weights(hidden_w, h, c, H, C, ACC) * mean[None, :], 1)
        activations += tl.sum(_weights(hidden_w + C, h, c, H, C, ACC) * std[None, :], 1)
    activations = tl.maximum(activations, 0.0)
    raw, _ = _raw_share(activations, out_w, out_bias, z, image, h, H, NOISY, ACC)
    return tl.minimum(tl.maximum(raw, 0.0), 1.0), activations


@triton.jit
def _interpolate(
    x, out, moments, u, global_mean, global_var, w, bias, running_mean, running_var,
    hidden_w, hidden_bias, out_w, out_bias, z, hidden,
    B, C, N, PLAIN, H, ub, uc, xb, xc, xn, ob, oc, on,
    EPS: tl.constexpr, FLOOR: tl.constexpr, MOMENTUM: tl.constexpr, AFFINE: tl.constexpr,
    ADAPTED: tl.constexpr, NOISY: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2)
    c = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    images = tl.arange(0, IMAGES)
    mean = _batch(moments, c, images, B, C)
    if ADAPTED:
        h = tl.arange(0, WIDTH)
        alpha, activations = _adapted(
            moments, global_mean, global_var, hidden_w, hidden_bias, out_w, out_bias, z, image, h, B, C, H,
            EPS, NOISY, ACC, 64,
        )  # fmt: skip
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(u + image, alpha)
            tl.store(hidden + image * H + h, activations, mask=h < H)
        share = tl.zeros_like(mean) + alpha
    else:
        share = _shares(u, c, images, B, C, ub, uc, ACC)
    centre, deviation, _, _, variance = _interpolated(
        mean, _batch(moments + B * C, c, images, B, C), share, global_mean, global_var,
        c, images, C, PLAIN, EPS, FLOOR, ACC,
    )  # fmt: skip
    if not ADAPTED:  # noqa: SIM102  known when it is compiled
        if (tl.program_id(0) == 0) & (image == 0) & (PLAIN > 0):
            number = (PLAIN * N).to(ACC)
            before = _row(running_mean, c, C, ACC)
            after = _column(centre, images, 0)
            tl.store(running_mean + c, before + MOMENTUM * (after - before), mask=c < C)
            before = _row(running_var, c, C, ACC)
            after = variance * number / (number - 1.0)
            tl.store(running_var + c, before + MOMENTUM * (after - before), mask=c < C)
    scale = 1.0 / _column(deviation, images, image)
    shift = tl.zeros([ROWS], ACC)
    if AFFINE:
        scale *= _row(w, c, C, ACC)
        shift = _row(bias, c, C, ACC)
    shift -= _column(centre, images, image) * scale
    _write(
        x, x, out, scale, scale, shift, image, c, C, N, xb, xc, xn, xb, xc, xn, ob, oc, on,
        False, ACC, COLUMNS, TILES,
    )  # fmt: skip


def _steps_of(u: Tensor) -> tuple[int, int]:
    """Return the strides by image and by channel of shares, (C,) or (B, 1)."""
    return (0, u.stride(0)) if u.dim() == 1 else (u.stride(0), 0)


def interpolate(
    x: Tensor, moments: Tensor, share: Tensor, global_mean: Tensor, global_var: Tensor, weight: Tensor | None,
    bias: Tensor | None, running_mean: Tensor, running_var: Tensor, eps: float, floor: float, momentum: float,
    plain: int,
) -> Tensor:  # fmt: skip
    x, *strides = _strides(x)
    out, *steps = _strides(torch.empty_like(x))
    blocks = _blocks(x, strides[2])
    _interpolate[_grid(x, blocks)](
        x, out, moments, share, global_mean, global_var, weight, bias, running_mean, running_var,
        *[None] * 6, *x.shape[:2], x.shape[2:].numel(), plain, 0, *_steps_of(share), *strides, *steps,
        EPS=eps, FLOOR=floor, MOMENTUM=momentum, AFFINE=weight is not None,
        ADAPTED=False, NOISY=False, WIDTH=1, TILES=_TILES, **blocks,
    )  # fmt: skip
    return out


def interpolate_adapted(
    x: Tensor, moments: Tensor, global_mean: Tensor, global_var: Tensor, weight: Tensor | None,
    bias: Tensor | None, hidden_weight: Tensor, hidden_bias: Tensor, out_weight: Tensor, out_bias: Tensor,
    z: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, *strides = _strides(x)
    out, *steps = _strides(torch.empty_like(x))
    blocks, width = _blocks(x, strides[2]), len(hidden_bias)
    share, hidden = moments.new_empty(len(x), 1), moments.new_empty(len(x), width)
    _interpolate[_grid(x, blocks)](
        x, out, moments, share, global_mean, global_var, weight, bias, None, None,
        hidden_weight, hidden_bias, out_weight, out_bias, z, hidden,
        *x.shape[:2], x.shape[2:].numel(), 0, width, 1, 0, *strides, *steps,
        EPS=eps, FLOOR=0.0, MOMENTUM=0.0, AFFINE=weight is not None,
        ADAPTED=True, NOISY=z is not None, WIDTH=triton.next_power_of_2(width), TILES=_TILES, **blocks,
    )  # fmt: skip
    return out, share, hidden


@triton.jit
def _interpolate_backward(
    g, x, out, grad_w, grad_bias, moments, sums, u, global_mean, global_var, w, pull,
    B, C, N, PLAIN, ub, uc, gb, gc, gn, xb, xc, xn, ob, oc, on,
    EPS: tl.constexpr, FLOOR: tl.constexpr, AFFINE: tl.constexpr, PULL: tl.constexpr, TILES: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2)
    c = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    images = tl.arange(0, IMAGES)
    valid = (c < C)[:, None] & (images < B)[None, :]
    mean = _batch(moments, c, images, B, C)
    share = _shares(u, c, images, B, C, ub, uc, ACC)
    centre, deviation, std, share_of_std, _ = _interpolated(
        mean, _batch(moments + B * C, c, images, B, C), share, global_mean, global_var,
        c, images, C, PLAIN, EPS, FLOOR, ACC,
    )  # fmt: skip
    inverse = tl.where(valid, 1.0 / tl.where(valid, deviation, 1.0), 0.0)
    total = _batch(sums, c, images, B, C)
    product = _batch(sums + B * C, c, images, B, C) + total * (mean - centre)
    if (tl.program_id(0) == 0) & (image == 0) & AFFINE:
        tl.store(grad_w + c, tl.sum(product * inverse, 1).to(grad_w.dtype.element_ty), mask=c < C)
        tl.store(grad_bias + c, tl.sum(total, 1).to(grad_bias.dtype.element_ty), mask=c < C)
    scales = inverse
    if AFFINE:
        scales = inverse * _row(w, c, C, ACC)[:, None]
    # Derivatives by the statistics of each image, as far as these have a share, and of the plain batch.
    by_mean = -share * scales * total
    by_std = -share_of_std * scales * inverse * product
    if PULL:
        by_mean += _batch(pull, c, images, B, C)
        by_std += _batch(pull + B * C, c, images, B, C)
    slopes = by_std / tl.where(valid, std, 1.0) / N
    shifts = by_mean / N - slopes * mean
    plain = (images < PLAIN)[None, :]
    number = tl.maximum(PLAIN, 1) * N
    total_of_all = tl.sum(tl.where(plain, total, 0.0), 1)[:, None] / number
    product_of_all = tl.sum(tl.where(plain, product, 0.0), 1)[:, None] / number
    slopes = tl.where(plain, -scales * inverse * inverse * product_of_all, slopes)
    shifts = tl.where(plain, -scales * total_of_all - slopes * centre, shifts)
    _write(
        g, x, out, _column(scales, images, image), _column(slopes, images, image),
        _column(shifts, images, image), image, c, C, N, gb, gc, gn, xb, xc, xn, ob, oc, on,
        True, ACC, COLUMNS, TILES,
    )  # fmt: skip


def interpolate_backward(
    grad: Tensor, x: Tensor, moments: Tensor, sums: Tensor, share: Tensor, global_mean: Tensor,
    global_var: Tensor, weight: Tensor | None, pull: Tensor | None, eps: float, floor: float, plain: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (x, *strides), (grad, *grad_strides) = _strides(x), _strides(grad)
    out, *steps = _strides(torch.empty_like(x))
    blocks = _blocks(x, strides[2])
    grad_weight = moments.new_empty(x.shape[1]) if weight is None else torch.empty_like(weight)
    grad_bias = torch.empty_like(grad_weight)
    _interpolate_backward[_grid(x, blocks)](
        grad, x, out, grad_weight, grad_bias, moments, sums, share, global_mean, global_var, weight, pull,
        *x.shape[:2], x.shape[2:].numel(), plain, *_steps_of(share), *grad_strides, *strides, *steps,
        EPS=eps, FLOOR=floor, AFFINE=weight is not None, PULL=pull is not None, TILES=_TILES, **blocks,
    )  # fmt: skip
    return out, grad_weight, grad_bias


@triton.jit
def _share(
    moments, global_mean, global_var, hidden_w, hidden_bias, out_w, out_bias, z, share, hidden, B, C, H,
    EPS: tl.constexpr, NOISY: tl.constexpr, ACC: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    h = tl.arange(0, WIDTH)
    alpha, activations = _adapted(
        moments, global_mean, global_var, hidden_w, hidden_bias, out_w, out_bias, z, image, h, B, C, H,
        EPS, NOISY, ACC, COLUMNS,
    )  # fmt: skip
    tl.store(hidden + image * H + h, activations, mask=h < H)
    tl.store(share + image, alpha)


def adapted_share(
    moments: Tensor, global_mean: Tensor, global_var: Tensor, hidden_weight: Tensor, hidden_bias: Tensor,
    out_weight: Tensor, out_bias: Tensor, z: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _, images, channels = moments.shape
    width, blocks = len(hidden_bias), _blocks_of_adapter(moments, len(hidden_bias))
    share, hidden = moments.new_empty(images, 1), moments.new_empty(images, width)
    _share[(images,)](
        moments, global_mean, global_var, hidden_weight, hidden_bias, out_weight, out_bias, z, share, hidden,
        images, channels, width, EPS=eps, NOISY=z is not None, **blocks,
    )  # fmt: skip
    return share, hidden


def _blocks_of_adapter(moments: Tensor, width: int) -> dict[str, Any]:
    wide = triton.next_power_of_2(width)
    columns = min(triton.next_power_of_2(moments.shape[2]), max(16, 2 * _TILE // wide))
    return {"ACC": _precision(moments), "WIDTH": wide, "COLUMNS": columns}


@triton.jit
def _share_backward(
    moments, sums, u, hidden, global_mean, global_var, w, hidden_w, hidden_bias, out_w, out_bias, z,
    pull, by_hidden_w, by_hidden_bias, by_out_w, by_out_bias, B, C, N, H,
    EPS: tl.constexpr, NOISY: tl.constexpr, AFFINE: tl.constexpr, IMAGES: tl.constexpr,
    ACC: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    images = tl.arange(0, IMAGES)
    by_share = tl.zeros([IMAGES], ACC)
    for start in range(0, C, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        valid = (c < C)[:, None] & (images < B)[None, :]
        mean = _batch(moments, c, images, B, C)
        share = _shares(u, c, images, B, C, 1, 0, ACC)
        centre, deviation, std, _, _ = _interpolated(
            mean, _batch(moments + B * C, c, images, B, C), share, global_mean, global_var,
            c, images, C, 0, EPS, 0.0, ACC,
        )  # fmt: skip
        inverse = tl.where(valid, 1.0 / tl.where(valid, deviation, 1.0), 0.0)
        total = _batch(sums, c, images, B, C)
        product = _batch(sums + B * C, c, images, B, C) + total * (mean - centre)
        scales = inverse
        if AFFINE:
            scales = inverse * _row(w, c, C, ACC)[:, None]
        other_std = tl.sqrt(_row(global_var, c, C, ACC) + EPS)[:, None]
        along = total * (mean - _row(global_mean, c, C, ACC)[:, None]) + product * inverse * (std - other_std)
        by_share -= tl.sum(tl.where(valid, scales * along, 0.0), 0)
    h = tl.arange(0, WIDTH)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weights_mean = _weights(hidden_w, h, c, H, C, ACC)
    weights_std = _weights(hidden_w + C, h, c, H, C, ACC)
    of_mean = tl.zeros([WIDTH, COLUMNS], ACC)
    of_std = tl.zeros([WIDTH, COLUMNS], ACC)
    of_hidden = tl.zeros([WIDTH], ACC)
    of_delta = tl.zeros([WIDTH], ACC)
    of_epsilon = tl.zeros([WIDTH], ACC)
    delta = tl.sum(by_share, 0) * 0.0
    epsilon = delta
    for image in range(B):
        activations = _row(hidden + image * H, h, H, ACC)
        raw, noise = _raw_share(activations, out_w, out_bias, z, image, h, H, NOISY, ACC)
        by_raw = tl.sum(tl.where(images == image, by_share, 0.0), 0)
        by_raw *= tl.where(raw < 0, 0.0, tl.where(raw > 1, 0.0, 1.0))  # clamped
        by_activations = by_raw * (noise * _row(out_w, h, H, ACC) + _row(out_w + H, h, H, ACC))
        by_activations = tl.where(activations > 0, by_activations, 0.0)
        mean, std = _differences(moments, global_mean, global_var, image, c, B, C, EPS, ACC)
        of_mean += by_activations[:, None] * mean[None, :]
        of_std += by_activations[:, None] * std[None, :]
        at = pull + image * C + c
        tl.store(at, tl.sum(by_activations[:, None] * weights_mean, 0), mask=c < C)
        tl.store(at + B * C, tl.sum(by_activations[:, None] * weights_std, 0), mask=c < C)
        of_hidden += by_activations
        of_delta += by_raw * noise * activations
        of_epsilon += by_raw * activations
        delta += by_raw * noise
        epsilon += by_raw
    kind = by_hidden_w.dtype.element_ty
    inside = (h < H)[:, None] & (c < C)[None, :]
    at = h[:, None] * (2 * C) + c[None, :]
    tl.store(by_hidden_w + at, of_mean.to(kind), mask=inside)
    tl.store(by_hidden_w + C + at, of_std.to(kind), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(by_hidden_bias + h, of_hidden.to(kind), mask=h < H)
        tl.store(by_out_w + h, of_delta.to(kind), mask=h < H)
        tl.store(by_out_w + H + h, of_epsilon.to(kind), mask=h < H)
        tl.store(by_out_bias, delta.to(kind))
        tl.store(by_out_bias + 1, epsilon.to(kind))


def adapted_share_backward(
    x: Tensor, moments: Tensor, sums: Tensor, share: Tensor, hidden: Tensor, global_mean: Tensor,
    global_var: Tensor, weight: Tensor | None, hidden_weight: Tensor, hidden_bias: Tensor, out_weight: Tensor,
    out_bias: Tensor, z: Tensor | None, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    _, images, channels = moments.shape
    width, blocks = len(hidden_bias), _blocks_of_adapter(moments, len(hidden_bias))
    pull = torch.empty_like(moments)
    gradients = [torch.empty_like(value) for value in (hidden_weight, hidden_bias, out_weight, out_bias)]
    _share_backward[(triton.cdiv(channels, blocks["COLUMNS"]),)](
        moments, sums, share, hidden, global_mean, global_var, weight,
        hidden_weight, hidden_bias, out_weight, out_bias, z, pull, *gradients,
        images, channels, x.shape[2:].numel(), width,
        EPS=eps, NOISY=z is not None, AFFINE=weight is not None,
        IMAGES=triton.next_power_of_2(images), **blocks,
    )  # fmt: skip
    return pull, *gradients
