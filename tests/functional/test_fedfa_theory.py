"""FedFA+ Section 4 in numbers: the noise of Lemma 4.1, and the regulariser of Theorem 4.1."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from medfedaug import functional as F

GAMMA = torch.tensor([0.4, 1.0]).double(), torch.tensor([0.1, 0.7]).double()
SHAPE = (3, 2)


@pytest.fixture
def features():
    torch.manual_seed(0)
    return torch.randn(*SHAPE, 4, 5).double() * 2 + torch.rand(*SHAPE, 1, 1).double()


@pytest.fixture
def loss(features):
    """The loss of a smooth network behind the layer, of the noise (2, B, C)."""
    weights, labels = torch.randn(2, 4).double(), torch.tensor([0, 3, 1])

    def of(noise):
        augmented = F.augment_features(features, *GAMMA, *noise)
        return cross_entropy(torch.tanh(augmented).square().mean((2, 3)) @ weights, labels)

    return of


def test_the_augmentation_is_the_noise_of_lemma_4_1(features):
    mean = features.mean((2, 3), keepdim=True)
    std = (features - mean).square().mean((2, 3), keepdim=True).sqrt()
    normal = (features - mean) / std
    sigma_mean, sigma_std = (
        ((gamma + 1) * value[..., 0, 0].var(0, unbiased=False)).sqrt()[None, :, None, None]
        for gamma, value in zip(GAMMA, (mean, std), strict=True)
    )
    noise_mean, noise_std = torch.randn(2, *SHAPE).double()
    e = noise_std[..., None, None] * sigma_std * normal + noise_mean[..., None, None] * sigma_mean  # Eq. 16
    moved = F.augment_features(features, *GAMMA, noise_mean, noise_std)
    torch.testing.assert_close(moved, features + e, rtol=1e-12, atol=1e-12)


def test_the_first_order_of_the_regulariser_vanishes_in_the_mean_and_the_second_remains(loss):
    zero = torch.zeros(2, *SHAPE).double()
    gradient = torch.autograd.functional.jacobian(loss, zero)
    draws = torch.randn(1000, 2, *SHAPE).double()
    first = (draws * gradient).sum((1, 2, 3))  # ∇ℓᵀ Σ J e of Theorem 4.1, a draw
    assert float(first.std()) > 0.01
    assert abs(float(first.mean())) < 3 * float(first.std()) / len(draws) ** 0.5
    hessian = torch.autograd.functional.hessian(loss, zero).reshape(zero.numel(), -1)
    half_trace = float(hessian.trace()) / 2  # of E[ℓ(e)] - ℓ for noise of deviation s, over s²
    with torch.no_grad():
        plain = float(loss(zero))
        for s in (0.02, 0.1):
            rises = [float(loss(s * e) + loss(-s * e)) / 2 - plain for e in draws[:500]]
            assert sum(rises) / len(rises) / s**2 == pytest.approx(half_trace, rel=0.1)
    assert abs(half_trace) > 1e-3
