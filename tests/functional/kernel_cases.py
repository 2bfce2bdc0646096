"""The kernels against float64: on a GPU, or in a process under Triton's interpreter.

`test_kernels.py` runs it with the interpreter, `benchmarks/gpu.sh` on a GPU.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

from medfedaug.functional import kernels
from medfedaug.functional import operators as plain

INTERPRETED = isinstance(kernels._moments, InterpretedFunction)
torch.set_default_device("cpu" if INTERPRETED else "cuda")

CASES = {
    "1D": (3, 5, 50),
    "2D": (2, 70, 6, 5),
    "3D": (2, 5, 4, 3, 5),
    "2 x 2 positions": (4, 3, 2, 2),
    "several tiles": (2, 2, 36, 30),
    "one image": (1, 6, 3, 4),
}
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    """Let the functions call the kernels directly, in the place of the operators."""
    monkeypatch.setattr(plain, "operators", kernels)


def features(shape, dtype=torch.float32, layout="contiguous"):
    torch.manual_seed(len(shape))
    x = torch.randn(shape, dtype=torch.float64) * torch.rand(shape[1]).view(-1, *[1] * (len(shape) - 2)) + 3
    x[0, 0] = 1.5  # a constant channel
    x = x.to(dtype)
    if layout == "last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    elif layout == "every second":
        x = x.repeat_interleave(2, dim=-1)[..., ::2]
    return x.requires_grad_()


def same(result, expected, dtype):
    scale = 1 + expected.abs().max()
    assert ((result.double() - expected).abs().max() / scale).item() < TOLERANCE[dtype]


@pytest.mark.parametrize("layout", ["contiguous", "last", "every second"])
def test_moments_and_sums(layout):
    x = features(shape := (2, 20, 6, 7), layout=layout)
    grad = torch.randn(shape)
    moments = kernels.moments(x)
    expected = torch.stack(plain.plain_moments(x.double()))
    same(moments, expected, torch.float32)
    assert (moments[1, 0, 0] == 0).all()
    for gradient in (grad, torch.ones(()).expand(shape)):
        sums = kernels.gradient_sums(gradient, x, moments)
        centred = x.double() - expected[0][..., None, None]
        wanted_value = torch.stack(
            [(gradient * factor).sum(dim=(2, 3)) for factor in (torch.ones_like(centred), centred)]
        )
        same(sums, wanted_value, torch.float32)


VARIANTS = {
    "adaptive": (1e-6, 1.0, -1.0),
    "without eps": (0.0, 1.0, -1.0),
    "client": (1e-6, 0.0, -1.0),
    "random": (1e-6, 0.0, 0.5),
}


def augmented(x, variant="adaptive", threshold=0.0, draw=-1.0):
    """The layer's step, its result in float64 and both derivatives."""
    torch.manual_seed(1)
    double, images, channels = torch.float64, *x.shape[:2]
    eps, weight, fixed = VARIANTS[variant]
    wide = double if x.dtype == double else torch.float32
    draws = torch.randn(2 * images * channels + 1, dtype=wide)
    draws[-1] = draw
    gammas = torch.rand(channels), torch.rand(channels)
    count = [torch.tensor(number) for number in (5, 7, 11)]
    buffers = (torch.zeros(channels), torch.ones(channels), *count)
    grad = torch.randn(x.shape, dtype=double)
    settings = (eps, threshold, weight, fixed)
    out = plain.AugmentAtOnce.apply(x, draws, gammas, buffers, 0.01, *settings)
    (grad_x,) = torch.autograd.grad(out, x, grad.to(x.dtype))
    exact = x.detach().double().requires_grad_()
    moments = torch.stack(plain.plain_moments(exact))
    wanted_value, statistics, std = plain.moved(exact, moments, draws.double(), gammas, *settings)
    (wanted_x,) = torch.autograd.grad(wanted_value, exact, grad.to(x.dtype).double())
    same(out, wanted_value, x.dtype)
    same(grad_x, wanted_x, x.dtype)
    assert out.dtype == grad_x.dtype == x.dtype
    active = draw < threshold
    expected = statistics.mean(dim=1) if active else (torch.zeros(channels), torch.ones(channels))
    share = 0.01 if active else 0.0
    for buffer, start, value in zip(buffers, (0.0, 1.0), expected, strict=False):
        same(buffer, start + share * (value - start).double(), torch.float32)
    moved = (1, int((std < 0).sum()), images * channels) if active else (0, 0, 0)
    assert [int(number) for number in count] == [5 + moved[0], 7 + moved[1], 11 + moved[2]]
    return out


@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", ["contiguous", "last"])
def test_augmentation(shape, layout):
    augmented(features(shape, torch.float64, layout), "random" if shape[0] == 1 else "adaptive")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_augmentation_in_all_variants(variant, dtype):
    augmented(features((3, 4, 5, 3), dtype), variant)


def test_augmentation_in_float16():
    augmented(features((3, 4, 5, 3), torch.float16))


def test_an_inactive_step_changes_nothing():
    x = features((3, 4, 5, 3))
    assert torch.equal(augmented(x, threshold=0.0, draw=0.5), x)
    augmented(x, threshold=float("inf"), draw=0.5)
    assert torch.equal(augmented(x, threshold=float("-inf"), draw=0.5), x)


def interpolated(x, share="random", plain_images=0, affine=True, floor=0.0, hidden=3):
    """A norm's pass and all derivatives, against float64."""
    torch.manual_seed(2)
    channels, images = x.shape[1], len(x)
    federation = torch.randn(channels), torch.rand(channels) + 0.5
    weight, bias = (torch.randn(channels), torch.randn(channels)) if affine else (None, None)
    z, adapter, u = None, (), None
    if share == "random":
        u = torch.rand(channels) * 3 - 1 if floor else torch.rand(channels)
    elif share == "by image":
        u = torch.rand(images, 1)
    else:
        z = torch.randn(images, 1) if share == "adapter with noise" else None
        sizes = ((hidden, 2 * channels), (hidden,), (2, hidden), (2,))
        adapter = tuple(torch.randn(size) * 0.3 for size in sizes)
        adapter[3].add_(torch.tensor([0.0, 0.4]))
    grad = torch.randn(x.shape)
    running = torch.zeros(channels), torch.ones(channels)
    scalars = (1e-5, floor, 0.1, plain_images)

    inputs = [v if v is None else v.detach().requires_grad_() for v in (x, weight, bias, *adapter)]
    exact = [v if v is None else v.detach().double().requires_grad_() for v in inputs]
    out = plain.InterpolateAtOnce.apply(*inputs[:3], u, federation, running, scalars, z, *inputs[3:])
    moments = torch.stack(plain.plain_moments(exact[0]))
    if adapter:
        u = plain._adapted(moments, federation, (*exact[3:], z if z is None else z.double()), 1e-5)
    wanted_value, mean, variance = plain.interpolated(
        exact[0], moments, u, federation, *exact[1:3], 1e-5, floor, plain_images
    )
    gradients, expected = (
        torch.autograd.grad(result, [v for v in leaves if v is not None], grad.to(result.dtype))
        for result, leaves in ((out, inputs), (wanted_value, exact))
    )
    same(out, wanted_value, x.dtype)
    for gradient, reference in zip(gradients, expected, strict=True):
        same(gradient, reference, x.dtype)
    if plain_images:
        number = plain_images * x[0, 0].numel()
        same(running[0], 0.1 * mean, torch.float32)
        same(running[1], 0.9 + 0.1 * variance * number / (number - 1), torch.float32)


@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_interpolation(shape):
    interpolated(features(shape, torch.float64, "last"))


@pytest.mark.parametrize("share", ["by image", "adapter", "adapter with noise"])
def test_shares(share):
    interpolated(features((3, 5, 4, 3), torch.float64), share, affine=share != "adapter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_interpolation_in_all_precisions(dtype):
    interpolated(features((3, 4, 5, 3), dtype), "adapter with noise")


def test_extrapolated_deviations_stay_at_the_floor():
    interpolated(features((3, 8, 5, 3)), floor=0.9)


def test_a_wide_adapter_runs_another_kernel(monkeypatch):
    monkeypatch.setattr(plain, "_FEW_WEIGHTS", 0)
    interpolated(features((3, 20, 5, 3)), "adapter with noise")


@pytest.mark.parametrize("shape", [(4, 5, 4, 3), (2, 3, 7)])
def test_a_plain_batch_beside_its_diversified_self(shape):
    interpolated(features(shape), plain_images=shape[0] // 2)


OPERATORS = (
    *("moments", "gradient_sums", "augment", "augment_backward", "interpolate", "interpolate_adapted"),
    *("interpolate_backward", "adapted_share", "adapted_share_backward"),
)


@pytest.mark.skipif(not INTERPRETED, reason="launches are counted under the interpreter")
def test_each_operator_starts_one_kernel(monkeypatch):
    """The count of operations on a pretended device takes an operator for one."""
    launched, called = [], Counter()

    def launch(executor, *args, **kwargs):
        launched.append(executor.fn)
        return start(executor, *args, **kwargs)

    def counted(name, function):
        def call(*args):
            called[name] += 1
            return function(*args)

        return call

    start = GridExecutor.__call__
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    for name in OPERATORS:
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    augmented(features((2, 3, 4, 3)))
    interpolated(features((2, 3, 4, 3)), "adapter")
    monkeypatch.setattr(plain, "_FEW_WEIGHTS", 0)
    interpolated(features((2, 3, 4, 3)), "adapter")
    assert len(launched) == called.total()
    assert set(called) == set(OPERATORS)
