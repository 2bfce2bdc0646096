"""The derivatives written by hand in `medfedaug.functional`, against differences and against autograd."""

import pytest
import torch

from medfedaug import functional as F
from medfedaug.functional.passes import scale_by_moments

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
def test_gradients_equal_the_equations(shape, channels_last):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    x.requires_grad_()
    arguments, weight = noise(shape), torch.randn(shape, dtype=torch.float64)
    (ours,) = torch.autograd.grad((F.augment_features(x, *arguments) * weight).sum(), x)
    (reference,) = torch.autograd.grad((line_by_line(x, *arguments) * weight).sum(), x)
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 2, 5), (2, 2, 2, 3, 2)])
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


@pytest.mark.parametrize("eps", [0.0, 1e-3])
@pytest.mark.parametrize("images", [1, 3])
def test_constant_channels_have_finite_derivatives(images, eps):
    torch.manual_seed(0)
    x = torch.randn(images, 4, 5, 3, dtype=torch.float64)
    x[:, 1], x[0, 2] = 0.0, 7.0  # a channel that is dead, and one that is constant in an image
    x.requires_grad_()
    y = F.augment_features(x, *noise(x.shape), eps=eps)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    for value in (y, first, second):
        assert bool(torch.isfinite(value).all())


@pytest.mark.parametrize("channels_last", [False, True])
def test_large_features_have_the_gradient_of_the_equations(channels_last):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 70, 60, dtype=torch.float64)  # more positions than are added up at once
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    arguments, weight = noise(x.shape), torch.randn_like(x)
    results = [f(x, *arguments) for f in (F.augment_features, line_by_line)]
    results += [torch.autograd.grad((y * weight).sum(), x)[0] for y in results]
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(results[2], results[3], rtol=1e-9, atol=1e-12)


def test_scaling_by_moments_has_the_gradient_of_the_equation():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 90, 80, dtype=torch.float64).to(memory_format=torch.channels_last)
    x.requires_grad_()
    weight, axes = torch.randn_like(x), (2, 3)

    def move(mean, variance):
        scale = (variance + 1e-3).rsqrt()
        return scale, -mean * scale

    ours = scale_by_moments(x, move)
    centred = x - x.mean(axes, keepdim=True)
    reference = centred / (centred.square().mean(axes, keepdim=True) + 1e-3).sqrt()
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (ours, reference)]
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_moments_of_large_features_far_from_zero_keep_their_digits():
    torch.manual_seed(0)
    x = (torch.randn(1, 4, 64, 64, 64) + 100).to(memory_format=torch.channels_last_3d)
    mean, variance = F.feature_moments(x)
    exact = x.double().flatten(2)
    torch.testing.assert_close(mean.double(), exact.mean(2), rtol=2e-5, atol=0)
    torch.testing.assert_close(variance.double(), exact.var(2, correction=0), rtol=1e-4, atol=0)
