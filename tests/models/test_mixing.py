"""Layers that mix the features of a batch, against their equations in float64."""

import pytest
import torch
from small_networks import build_small

from medfedaug.models import (
    FeatureMixLayer,
    FFALayer,
    MixStyleLayer,
    MomentExchangeLayer,
    build_network,
    insert_ffa,
    insert_layers,
    remove_ffa,
    remove_layers,
    stage_layers,
)
from medfedaug.models.stages import known_stages
from medfedaug.research.methods.mixstyle import MixStyle
from medfedaug.research.methods.moex import MoEx

KINDS = [MixStyleLayer, MomentExchangeLayer, FeatureMixLayer]


def features(spatial_dims=2, batch=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(batch, 3, *[5] * spatial_dims, generator=generator, dtype=torch.float64) + 1


def test_mixstyle_of_volumes_is_its_equation():
    x = features(3)
    layer = MixStyleLayer(3, prob=1.0, alpha=0.6, eps=1e-6)
    torch.manual_seed(1)
    result = layer(x)
    torch.manual_seed(1)
    torch.rand(())
    share = torch.distributions.Beta(0.6, 0.6).sample((4, 1)).double()
    order = torch.randperm(4)
    expected = torch.empty_like(x)
    for i in range(4):
        for c in range(3):
            own, other = x[i, c], x[order[i], c]
            mean, std = own.mean(), (((own - own.mean()) ** 2).mean() + 1e-6).sqrt()
            mean2, std2 = other.mean(), (((other - other.mean()) ** 2).mean() + 1e-6).sqrt()
            scale, shift = (share[i] * std + (1 - share[i]) * std2, share[i] * mean + (1 - share[i]) * mean2)
            expected[i, c] = scale * (own - mean) / std + shift
    assert not torch.equal(order, torch.arange(4))
    torch.testing.assert_close(result, expected)


def test_no_gradient_flows_through_the_mixed_statistics():
    x = features().requires_grad_()
    torch.manual_seed(1)
    y = MixStyleLayer(3, prob=1.0, alpha=0.6)(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    # With constant statistics y is affine in x: one slope an image and channel.
    assert torch.equal(slope, slope[..., :1, :1].expand_as(slope))


def test_mixstyle_is_active_as_often_as_asked():
    x, layer = features(), MixStyleLayer(3, prob=0.3)
    torch.manual_seed(0)
    active = sum(layer(x) is not x for _ in range(600)) / 600
    assert active == pytest.approx(0.3, abs=0.06)
    assert MixStyleLayer(3, prob=1.0, alpha=0.0)(x) is x
    assert layer.eval()(x) is x


def test_moment_exchange_of_volumes_is_its_equation():
    x = features(3)
    layer = MomentExchangeLayer(3, eps=1e-5)
    layer.partners = torch.tensor([2, 0, 3, 1])
    for result, own, other in zip(layer(x), x, x[layer.partners], strict=True):

        def moment(v):
            mean = v.mean(0, keepdim=True)
            return mean, (((v - mean) ** 2).mean(0, keepdim=True) + 1e-5).sqrt()

        (mean, std), (mean2, std2) = moment(own), moment(other)
        torch.testing.assert_close(result, std2 * (own - mean) / std + mean2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [MixStyleLayer, MomentExchangeLayer])
def test_in_half_precision_only_the_result_is_rounded(make, dtype):
    """Deviations above 255 have variances beyond float16; the deviation is small against the mean."""
    layer = make(3)
    layer.prob, layer.partners = 1.0, torch.tensor([2, 0, 3, 1])
    for x in (300 * features().to(dtype), (3 + features() / 100).to(dtype)):
        torch.manual_seed(1)
        result = layer(x)
        torch.manual_seed(1)
        exact = layer(x.double())
        assert result.dtype == dtype
        torch.testing.assert_close(result, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=0.002)


def test_partners_of_another_batch_are_refused():
    layer = MomentExchangeLayer(3)
    layer.partners = torch.arange(3)
    with pytest.raises(ValueError, match="MOEX layer : 3 partners for 4 images"):
        layer(features())
    assert layer.eval()(features()).shape == (4, 3, 5, 5)


def test_feature_mix_is_the_weighted_mean():
    x, layer = features(), FeatureMixLayer(3)
    assert layer(x) is x
    layer.partners, layer.weight = torch.tensor([1, 2, 3, 0]), 0.3
    torch.testing.assert_close(layer(x), 0.3 * x + 0.7 * x[[1, 2, 3, 0]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["unet", "lenet5"])
def test_layers_leave_state_dict_and_evaluation_alone_and_stand_beside_ffa(kind, name):
    network = build_network(name, in_channels=3, out_channels=2)
    x = torch.rand(2, 3, 32, 32)
    network(x)
    plain, keys = network.eval()(x), list(network.state_dict())
    names, stages = [n for n, _ in network.named_modules()], known_stages(network)
    insert_layers(insert_ffa(network), kind, stages=[1, 2])
    assert list(stage_layers(network, kind)) == ["enc1", "enc2"]
    assert len(stage_layers(network, FFALayer)) == len(stages)
    assert known_stages(network) == stages
    assert list(network.state_dict()) == keys
    assert torch.equal(network(x), plain)
    with pytest.raises(ValueError, match=f"already has {kind.kind} layers"):
        insert_layers(network, kind)
    remove_ffa(network)
    assert len(stage_layers(network, kind)) == 2
    remove_layers(network)
    assert [n for n, _ in network.named_modules()] == names


@pytest.mark.parametrize("name", ["dynunet", "resnet18", "unet"])
def test_moments_are_exchanged_within_a_network(name):
    network = MoEx().prepare_network(build_small(name, size=64, in_channels=1, out_channels=2)).train()
    (layer,) = stage_layers(network, MomentExchangeLayer).values()
    seen = {}
    layer.register_forward_hook(lambda m, args, out: seen.update(x=args[0], y=out))
    layer.partners = torch.tensor([1, 0])
    network(torch.rand(2, 1, 64, 64))
    assert not torch.equal(seen["x"], seen["y"])
    torch.testing.assert_close(seen["y"].mean(1), seen["x"][[1, 0]].mean(1), rtol=1e-3, atol=1e-3)


def test_arguments_out_of_range_are_refused():
    for method in (MixStyle(prob=2), MixStyle(alpha=-1)):
        with pytest.raises(ValueError, match="is "):
            method.prepare_network(build_network("lenet5"))
