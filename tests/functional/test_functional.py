"""The equations against float64 references written from the papers."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from medfedaug import functional as F
from medfedaug.functional.features import moments

SHAPES = [(4, 3, 7), (5, 3, 6, 5), (3, 2, 4, 5, 3)]


def reference_augmentation(x, gamma_mean, gamma_std, noise_mean, noise_std, eps=0.0):
    """FedFA+ Eq. 2, 4, 8, 9, 10, one image and channel at a time."""
    batch, channels = x.shape[:2]
    mu = np.array([[x[b, c].mean() for c in range(channels)] for b in range(batch)])
    sigma = np.array(
        [[math.sqrt(((x[b, c] - mu[b, c]) ** 2).mean() + eps) for c in range(channels)] for b in range(batch)]
    )
    out = np.empty_like(x)
    for c in range(channels):
        variance_mu = sum((mu[b, c] - mu[:, c].mean()) ** 2 for b in range(batch)) / batch
        variance_sigma = sum((sigma[b, c] - sigma[:, c].mean()) ** 2 for b in range(batch)) / batch
        spread_mu = math.sqrt((gamma_mean[c] + 1) * variance_mu)
        spread_sigma = math.sqrt((gamma_std[c] + 1) * variance_sigma)
        for b in range(batch):
            new_mu = mu[b, c] + noise_mean[b, c] * spread_mu
            new_sigma = sigma[b, c] + noise_std[b, c] * spread_sigma
            out[b, c] = new_sigma * (x[b, c] - mu[b, c]) / sigma[b, c] + new_mu
    return out


def draw(shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    batch, channels = shape[:2]
    x = normal(*shape) * 2 + 1
    return (
        x,
        normal(channels).abs(),
        normal(channels).abs(),
        normal(batch, channels),
        normal(batch, channels),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_augmentation_equals_the_printed_equations(shape, eps):
    args = draw(shape)
    expected = reference_augmentation(*(a.numpy() for a in args), eps=eps)
    np.testing.assert_allclose(F.augment_features(*args, eps=eps).numpy(), expected, rtol=1e-11, atol=1e-11)


def test_augmentation_in_float32_and_with_a_large_offset():
    x, *rest = draw((6, 3, 16, 16))
    for offset, tolerance in ((0.0, 1e-5), (1e3, 5e-3)):
        expected = reference_augmentation((x + offset).numpy(), *(a.numpy() for a in rest))
        got = F.augment_features((x + offset).float(), *(a.float() for a in rest))
        assert got.dtype == torch.float32
        assert np.abs(got.numpy() - expected).max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zero_noise_is_the_identity(dtype):
    x, gamma_mean, gamma_std, noise, _ = draw(SHAPES[1], dtype=dtype)
    zero = torch.zeros_like(noise)
    assert torch.equal(F.augment_features(x, gamma_mean, gamma_std, zero, zero), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_image_is_not_augmented(dtype):
    x, *rest = draw((1, 3, 6, 5), dtype=dtype)
    x.requires_grad_()
    out = F.augment_features(x, *rest)
    assert torch.equal(out, x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("value", [0.0, 0.1, -1234.5])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_constant_channel_moves_by_its_mean_only(value, eps):
    x, gamma_mean, gamma_std, noise_mean, noise_std = draw((4, 3, 37, 41), dtype=torch.float32)
    x[2, 1] = value
    x.requires_grad_()
    out = F.augment_features(x, gamma_mean, gamma_std, noise_mean, noise_std, eps=eps)
    means = x.detach().double()[:, 1].mean(dim=(1, 2))
    shift = noise_mean[2, 1] * ((gamma_mean[1] + 1) * means.var(unbiased=False)).sqrt()
    torch.testing.assert_close(out[2, 1], torch.full((37, 41), value + shift.item()), rtol=3e-4, atol=1e-5)
    out.square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_identical_images_give_finite_gradients():
    x, *rest = draw((1, 3, 6, 5), dtype=torch.float32)
    x = x.expand(4, -1, -1, -1).clone().requires_grad_()
    noise = rest[2].expand(4, -1), rest[3].expand(4, -1)
    F.augment_features(x, rest[0], rest[1], *noise).square().sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x, *rest = draw((4, 3, 16, 16))
    # The variance of such a channel is far below the resolution of half precision at its mean.
    x = (x + 30).to(dtype)
    out = F.augment_features(x, *(a.to(dtype) for a in rest))
    expected = reference_augmentation(x.double().numpy(), *(a.to(dtype).double().numpy() for a in rest))
    assert out.dtype == dtype
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("images", [1, 3])
def test_constant_channels_have_finite_derivatives(images):
    x, *rest = draw((images, 3, 5, 3))
    x[:, 1], x[0, 2] = 0.0, 7.0  # a channel that is dead, and one that is constant in an image
    y = F.augment_features(x.requires_grad_(), *rest)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert all(bool(torch.isfinite(value).all()) for value in (first, second))


def test_gradient_flows_through_the_statistics():
    x, *rest = draw((3, 2, 3, 2))
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: F.augment_features(x, *rest, eps=1e-3), (x,))
    (with_statistics,) = torch.autograd.grad(F.augment_features(x, *rest).square().sum(), x)
    mean, std = (s.detach() for s in F.feature_statistics(x))
    spreads = (F.augmentation_spread(mean, rest[0]), F.augmentation_spread(std, rest[1]))
    frozen = F.perturb_features(x, mean, std, *spreads, rest[2], rest[3])
    (without,) = torch.autograd.grad(frozen.square().sum(), x)
    assert (with_statistics - without).abs().max() > 1e-2


def test_across_site_variance_is_per_channel():
    values = torch.randn(5, 7, dtype=torch.float64)
    expected = [sum((values[m, c] - values[:, c].mean()) ** 2 for m in range(5)) / 5 for c in range(7)]
    torch.testing.assert_close(F.across_site_variance(values), torch.stack(expected))
    assert torch.equal(F.across_site_variance(values[:1]), torch.zeros(7, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_student_t_modulation(dtype):
    variance = torch.tensor([3.0, 1e-3, 1e-12, 40.0, 0.5], dtype=dtype)
    kernel = [1 / (1 + 1 / v) for v in variance.double().tolist()]
    expected = torch.tensor([5 * k / sum(kernel) for k in kernel], dtype=dtype)
    torch.testing.assert_close(F.student_t_modulation(variance), expected)
    assert F.student_t_modulation(variance).unique().numel() == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_student_t_modulation_at_its_limits(dtype):
    ones = torch.ones(4, dtype=dtype)
    for equal in (0.0, 1e-4, 1.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny):
        torch.testing.assert_close(F.student_t_modulation(ones * equal), ones)
    mixed = torch.tensor([0.0, torch.inf, 1.0, 0.0], dtype=dtype, requires_grad=True)
    gamma = F.student_t_modulation(mixed)
    torch.testing.assert_close(gamma, torch.tensor([0.0, 8 / 3, 4 / 3, 0.0], dtype=dtype))
    gamma.square().sum().backward()
    assert torch.isfinite(mixed.grad).all()
    zero = torch.zeros(4, dtype=dtype, requires_grad=True)
    F.student_t_modulation(zero).sum().backward()
    assert torch.isfinite(zero.grad).all()


def reference_histogram(z, bins, tau, low, high):
    """FedFA+ Eq. 11 and 12, one sample, channel and bin at a time."""
    rho = [i / (bins - 2) for i in range(bins - 1)]
    w = list(range(1, bins + 1))
    b = [-sum(rho[:i]) for i in range(bins)]
    samples, channels = z.shape
    pi = np.zeros((channels, bins))
    for c in range(channels):
        for i in range(samples):
            scaled = (z[i, c] - low[c]) / (high[c] - low[c])
            logits = [(w[k] * scaled + b[k]) / tau for k in range(bins)]
            weights = [math.exp(v - max(logits)) for v in logits]
            pi[c] += np.array(weights) / sum(weights) / samples
    return pi


@pytest.mark.parametrize(("bins", "tau"), [(3, 0.01), (8, 0.01), (8, 0.5), (24, 0.01)])
@pytest.mark.parametrize("arguments", [False, True])
def test_soft_histogram_equals_the_printed_equations(bins, tau, arguments):
    z = torch.randn(50, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high = z.amin(0), z.amax(0)
    if arguments:
        low, high = low - 0.3, high - 0.2  # the batch leaves the range at its upper end
    got = F.soft_histogram(z, bins, tau, *((low, high) if arguments else ()))
    expected = reference_histogram(z.numpy(), bins, tau, low.numpy(), high.numpy())
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_soft_histogram_is_a_distribution_whatever_the_values(dtype):
    z = torch.tensor(
        [[1.0, 5.0, -1e30], [1.0, 7.0, 1e30], [1.0, 900.0, 0.0]], dtype=dtype, requires_grad=True
    )
    low, high = torch.tensor([1.0, 5.0, 0.0], dtype=dtype), torch.tensor([1.0, 7.0, 1.0], dtype=dtype)
    for histogram in (F.soft_histogram(z), F.soft_histogram(z, low=low, high=high)):
        assert histogram.dtype == dtype
        assert histogram.shape == (3, 8)
        torch.testing.assert_close(histogram.float().sum(1), torch.ones(3), rtol=0, atol=1e-2)
        (gradient,) = torch.autograd.grad(histogram.square().sum(), z)
        assert torch.isfinite(gradient).all()
    outside = F.soft_histogram(z, low=low, high=high)[2]
    torch.testing.assert_close(outside[[0, -1]].float(), torch.tensor([0.5, 1 / 3]), rtol=0, atol=1e-2)


def test_symmetric_kl():
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.rand(4, 6, generator=generator, dtype=torch.float64) + 0.01 for _ in range(2))
    p, q = (h / h.sum(1, keepdim=True) for h in (p, q))
    expected = 0.0
    for c in range(4):
        forward = sum(p[c, i] * math.log(p[c, i] / q[c, i]) for i in range(6))
        backward = sum(q[c, i] * math.log(q[c, i] / p[c, i]) for i in range(6))
        expected += 0.5 * (forward + backward) / 4
    torch.testing.assert_close(F.symmetric_kl(p, q), expected)
    torch.testing.assert_close(F.symmetric_kl(q, p), expected)
    assert F.symmetric_kl(p, p) == 0
    assert torch.autograd.gradcheck(F.symmetric_kl, (p.requires_grad_(), q.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_symmetric_kl_with_empty_bins(dtype):
    p = torch.tensor([[1.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    q = torch.tensor([[0.0, 0.0, 1.0]], dtype=dtype, requires_grad=True)
    divergence = F.symmetric_kl(p, q)
    # Each of the two disjoint bins contributes log(1 / eps) / 2.
    torch.testing.assert_close(divergence, torch.tensor(-math.log(1e-8), dtype=dtype))
    divergence.backward()
    assert torch.isfinite(p.grad).all()
    assert torch.isfinite(q.grad).all()


def test_mix_statistics():
    local, global_, u = torch.randn(4, 3), torch.randn(3), torch.rand(3)
    expected = torch.stack(
        [torch.stack([u[c] * local[b, c] + (1 - u[c]) * global_[c] for c in range(3)]) for b in range(4)]
    )
    torch.testing.assert_close(F.mix_statistics(local, global_, u), expected)
    assert torch.equal(F.mix_statistics(local[0], global_, torch.ones(3)), local[0])
    assert torch.equal(F.mix_statistics(local[0], global_, torch.zeros(3)), global_)
    assert F.mix_statistics(local.bfloat16(), global_, u).dtype == torch.bfloat16


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_moments_far_from_zero_keep_their_digits(layout):
    torch.manual_seed(0)
    x = (torch.randn(1, 4, 64, 64, 64) + 100).to(memory_format=layout)
    mean, variance = moments(x)
    exact = x.double().flatten(2)
    torch.testing.assert_close(mean.double(), exact.mean(2), rtol=2e-5, atol=0)
    torch.testing.assert_close(variance.double(), exact.var(2, correction=0), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("function", "shapes", "name"),
    [
        (F.augment_features, [(4, 3, 5), (1, 3), (3,), (4, 3), (4, 3)], "gamma_mean"),
        (F.augment_features, [(4, 3, 5), (3,), (3,), (4, 1), (4, 3)], "noise_mean"),
        (partial(F.soft_histogram, bins=2), [(5, 3)], "low"),
        (F.symmetric_kl, [(3, 4), (1, 4)], "q"),
        (F.across_site_variance, [(3,)], "values"),
        (F.mix_statistics, [(2, 3), (3,), (1,)], "u"),
    ],
)
def test_a_shape_that_would_broadcast_is_refused(function, shapes, name):
    more = {"low": torch.zeros(1)} if name == "low" else {}
    with pytest.raises(ValueError, match=f"expected {name}"):
        function(*map(torch.zeros, shapes), **more)
