"""The derivatives written by hand in `medfedaug.functional`, against differences and against autograd."""

from __future__ import annotations

import pytest
import torch

from medfedaug import functional as F

SHAPES = [(3, 2, 5), (3, 2, 4, 5), (2, 2, 3, 4, 2)]


def noise(shape):
    draws = torch.randn(2, *shape[:2], dtype=torch.float64)
    return (*torch.rand(2, shape[1], dtype=torch.float64), *draws)


def line_by_line(x, gamma_mean, gamma_std, noise_mean, noise_std):
    axes = tuple(range(2, x.dim()))

    def channels(v):
        return v.reshape(*v.shape, *[1] * len(axes))

    mean = x.mean(axes)
    std = (x - channels(mean)).pow(2).mean(axes).sqrt()
    spread_mean = ((gamma_mean + 1) * (mean - mean.mean(0)).pow(2).mean(0)).sqrt()
    spread_std = ((gamma_std + 1) * (std - std.mean(0)).pow(2).mean(0)).sqrt()
    normalised = (x - channels(mean)) / channels(std)
    return channels(std + noise_std * spread_std) * normalised + channels(mean + noise_mean * spread_mean)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradient_is_that_of_the_equations(shape, channels_last):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    x.requires_grad_()
    arguments, weight = noise(shape), torch.randn(shape, dtype=torch.float64)
    (ours,) = torch.autograd.grad((F.augment_features(x, *arguments) * weight).sum(), x)
    (reference,) = torch.autograd.grad((line_by_line(x, *arguments) * weight).sum(), x)
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_first_and_second_derivative_against_differences(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    arguments = noise(shape)
    assert torch.autograd.gradcheck(lambda x: F.augment_features(x, *arguments), x)
    assert torch.autograd.gradgradcheck(lambda x: F.augment_features(x, *arguments), x)


def test_gradient_reaches_every_argument_of_perturb_features():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    vectors = [torch.rand(size, dtype=torch.float64) + 0.5 for size in ((3, 2), (3, 2), 2, 2, (3, 2), (3, 2))]
    inputs = [v.requires_grad_() for v in (x, *vectors)]
    assert torch.autograd.gradcheck(F.perturb_features, inputs)


def test_gradients_of_torch_func():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    arguments = noise(x.shape)
    ours = torch.func.grad(lambda x: F.augment_features(x, *arguments).pow(3).sum())(x)
    reference = torch.func.grad(lambda x: line_by_line(x, *arguments).pow(3).sum())(x)
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
