"""The FFA layer: Algorithm 2 against a float64 reference, its state, its copies and compilation."""

import copy
import pickle

import numpy as np
import pytest
import torch

from medfedaug.errors import MedFedAugWarning
from medfedaug.models import FFALayer

SHAPES = [(4, 3, 9), (4, 3, 6, 5), (3, 3, 4, 5, 3)]
SHARED = (torch.tensor([0.2, 1.0, 1.8]), torch.tensor([1.5, 0.9, 0.6]))


def features(shape=(4, 3, 6, 5), seed=0, dtype=torch.float64):
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 + 1
    ).to(dtype)


def replayed_noise(shape, seed):
    """Replay the draws of an active layer: its activity, then noise for mean and for std."""
    torch.manual_seed(seed)
    torch.rand(1)
    x = features(shape)
    return [torch.randn_like(x.mean(dim=tuple(range(2, x.ndim)))).numpy() for _ in range(2)]


def image_statistics(x, eps):
    flat = x.reshape(*x.shape[:2], -1)
    mu = flat.mean(-1)
    return mu, np.sqrt(((flat - mu[..., None]) ** 2).mean(-1) + eps)


def algorithm_2(x, noise, variance, eps):
    """Lines 2 to 10 in float64 NumPy."""
    mu, sigma = image_statistics(x, eps)
    gammas = [g.double().numpy() for g in SHARED] if variance in ("adaptive", "direct") else [0.0, 0.0]
    new = []
    for s, e, gamma in zip((mu, sigma), noise, gammas, strict=True):
        own = ((s - s.mean(0)) ** 2).mean(0)
        spread = 0.5 if variance == "random" else np.sqrt((gamma + 1) * own)
        new.append(s + e * spread)
    wide = (..., *[None] * (x.ndim - 2))
    return new[1][wide] * (x - mu[wide]) / sigma[wide] + new[0][wide], new[1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variance", ["adaptive", "direct", "client", "random"])
def test_active_layer_equals_algorithm_2(shape, variance):
    x = features(shape)
    layer = FFALayer(3, prob=1.0, variance=variance)
    layer.set_gamma(*SHARED)
    noise = replayed_noise(shape, seed=7)
    torch.manual_seed(7)
    expected, new_std = algorithm_2(x.numpy(), noise, variance, eps=1e-6)
    np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(x, features(shape))
    assert layer.sampled_std_count == new_std.size
    assert layer.negative_std_count == (new_std < 0).sum()


def test_statistics_accumulate_as_equation_5():
    layer = FFALayer(3, prob=1.0, momentum=0.9)
    mean, std = np.zeros(3), np.ones(3)
    for step in range(5):
        x = features(seed=step)
        layer(x)
        mu, sigma = image_statistics(x.numpy(), 1e-6)
        mean = 0.9 * mean + 0.1 * mu.mean(0)
        std = 0.9 * std + 0.1 * sigma.mean(0)
    got = layer.statistics()
    np.testing.assert_allclose(got[0].numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(got[1].numpy(), std, rtol=1e-5)
    assert layer.num_active_batches == 5


def test_bias_correction_removes_the_start_values():
    x = features()
    mu, sigma = image_statistics(x.numpy(), 1e-6)
    plain, corrected = FFALayer(3, prob=1.0), FFALayer(3, prob=1.0, bias_correction=True)
    for got, start in zip(corrected.statistics(), (torch.zeros(3), torch.ones(3)), strict=True):
        assert torch.equal(got, start)
    for steps in range(1, 4):
        plain(x)
        corrected(x)
        # The same batch again and again: the corrected average is its statistics, whatever the number of
        # steps.
        np.testing.assert_allclose(corrected.statistics()[0].numpy(), mu.mean(0), rtol=1e-4)
        np.testing.assert_allclose(corrected.statistics()[1].numpy(), sigma.mean(0), rtol=1e-4)
        np.testing.assert_allclose(
            plain.statistics()[1].numpy(), 0.99**steps + (1 - 0.99**steps) * sigma.mean(0), rtol=1e-5
        )


@pytest.mark.parametrize("running", ["reset", "continue"])
def test_start_round(running):
    layer = FFALayer(3, prob=1.0, running=running)
    layer.set_gamma(*SHARED)
    layer(features())
    before = layer.statistics()
    layer.start_round()
    expected = (torch.zeros(3), torch.ones(3)) if running == "reset" else before
    assert torch.equal(layer.statistics()[0], expected[0])
    assert torch.equal(layer.statistics()[1], expected[1])
    assert layer.num_active_batches == (0 if running == "reset" else 1)
    assert torch.equal(layer.gamma_mean, SHARED[0])


def test_negative_standard_deviations_keep_their_sign_and_are_counted():
    x = features((2, 3, 4, 4)) * 0.01
    layer = FFALayer(3, prob=1.0, variance="random")
    torch.manual_seed(1)
    out = layer(x)
    flat_in, flat_out = x.flatten(2) - x.mean((2, 3))[..., None], out.flatten(2) - out.mean((2, 3))[..., None]
    mirrored = ((flat_in * flat_out).sum(-1) < 0).sum()
    assert mirrored > 0
    assert layer.negative_std_count == mirrored
    assert layer.sampled_std_count == 6


def test_evaluation_returns_its_argument():
    layer = FFALayer(3, prob=1.0).eval()
    before = copy.deepcopy(dict(layer.named_buffers()))
    for x in (features(), features().requires_grad_(), torch.zeros(2, 7)):
        assert layer(x) is x
    x = features()
    assert FFALayer(3, prob=0.0)(x) is x
    assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers())


@pytest.mark.parametrize("shape", [(1, 3, 6, 5), (1, 3, 4, 4, 4), (1, 3, 1, 1), (4, 3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_degenerate_batches_have_finite_values_and_gradients(shape, dtype):
    layer = FFALayer(3, prob=1.0)
    layer.set_gamma(*SHARED)
    x = features(shape, dtype=dtype).requires_grad_()
    out = layer(x)
    assert out.dtype == dtype
    if shape[0] == 1:
        assert torch.equal(out, x)
    assert torch.isfinite(out).all()
    out.float().square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(layer.running_std).all()


def test_gradient():
    layer = FFALayer(3, prob=1.0, eps=1e-3).double()
    layer.set_gamma(*SHARED)

    def forward(x):
        torch.manual_seed(0)
        return layer(x)

    assert torch.autograd.gradcheck(forward, (features((3, 3, 2, 3)).requires_grad_(),))
    assert not any(buffer.requires_grad for buffer in layer.buffers())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_networks_keep_exact_statistics(dtype):
    layer = FFALayer(3, prob=1.0)
    layer.set_gamma(*SHARED)
    layer.to(dtype)
    assert layer.running_mean.dtype == layer.gamma_std.dtype == torch.float32
    assert torch.equal(layer.gamma_mean, SHARED[0])
    assert layer(features(dtype=dtype)).dtype == dtype
    assert FFALayer(3).double().running_mean.dtype == torch.float64


def test_copies_are_independent():
    layer = FFALayer(3, prob=1.0, variance="client")
    layer(features())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(other) == repr(layer)
        assert torch.equal(other.running_mean, layer.running_mean)
        other.start_round()
        assert not torch.equal(other.running_mean, layer.running_mean)


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 5, 5), (3, 5)])
def test_wrong_features_are_refused_active_or_not(shape):
    for prob in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"\(B, 3, \*spatial\), got \[" + str(shape[0])):
            FFALayer(3, prob=prob)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prob": 1.5}, "prob is 1.5"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"eps": -1e-6}, "eps is -1e-06"),
        ({"variance": "both"}, "adaptive, direct, client, random"),
        ({"running": "never"}, "reset, continue"),
        ({"running": "continue", "bias_correction": True}, 'running="reset"'),
    ],
)
def test_impossible_arguments(args, message):
    with pytest.raises(ValueError, match=message):
        FFALayer(**{"num_channels": 3, **args})


@pytest.mark.parametrize("variance", ["adaptive", "direct", "client", "random"])
def test_torchscript(variance):
    x = features(dtype=torch.float32)
    layer = FFALayer(3, prob=1.0, variance=variance)
    layer.set_gamma(*SHARED)
    scripted = torch.jit.script(copy.deepcopy(layer))
    torch.manual_seed(0)
    expected = layer(x)
    torch.manual_seed(0)
    torch.testing.assert_close(scripted(x), expected)
    torch.testing.assert_close(scripted.running_std, layer.running_std)
    assert torch.equal(scripted.eval()(x), x)


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    layer = FFALayer(3, prob=0.5, momentum=0.9)
    layer.set_gamma(*SHARED)
    # The `aot_eager` backend traces forward and backward as any backend does, without a C++ compiler.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    reference = FFALayer(3, prob=1.0, momentum=0.9)
    torch.manual_seed(0)
    active = 0
    for step in range(30):
        x = features((2, 3, 4, 4), seed=step, dtype=torch.float32).requires_grad_()
        out = compiled(x)
        out.sum().backward()
        assert torch.isfinite(x.grad).all()
        if not torch.equal(out, x):
            active += 1
            reference(x)
    assert 5 < active < 25
    assert layer.num_active_batches == active
    assert layer.sampled_std_count == 6 * active
    torch.testing.assert_close(layer.running_mean, reference.running_mean)
    torch.testing.assert_close(layer.running_std, reference.running_std)
    layer.eval()
    assert torch.equal(compiled(x), x)


@pytest.mark.parametrize(
    ("shape", "variance", "reported"),
    [
        ((2, 2), "adaptive", "2 x 2"),
        ((2, 2, 2), "client", "2 x 2 x 2"),
        ((3, 3), "adaptive", ""),
        ((1, 1), "random", ""),
    ],
)
def test_features_of_few_positions_are_warned_of(shape, variance, reported, recwarn):
    layer = FFALayer(3, prob=0.0, variance=variance)
    layer.stage = "bottleneck"
    layer(features((4, 3, *shape)))
    values = [str(warning.message) for warning in recwarn if warning.category is MedFedAugWarning]
    assert len(values) == bool(reported)
    assert all(f"FFA layer bottleneck: features of {reported} positions" in text for text in values)


@pytest.mark.parametrize("variance", ["adaptive", "direct", "client", "random"])
def test_a_batch_of_one_image_is_no_active_one(variance, recwarn):
    layer = FFALayer(3, prob=1.0, variance=variance)
    layer.set_gamma(*SHARED)
    outputs = [layer(features((1, 3, 6, 5), seed=step)) for step in range(3)]
    active = variance == "random"
    assert layer.num_active_batches == layer.sampled_std_count / 3 == (3 if active else 0)
    assert torch.equal(outputs[0], features((1, 3, 6, 5), seed=0)) != active
    assert torch.equal(layer.running_mean, torch.zeros(3)) != active
    reported = [str(warning.message) for warning in recwarn if warning.category is MedFedAugWarning]
    assert bool(reported) != active
    assert all("batch of one image" in text for text in reported)
