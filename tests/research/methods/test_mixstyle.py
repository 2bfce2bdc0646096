"""MixStyle against Zhou et al., ICLR 2021."""

import pytest
import torch
from reference import UNEVEN, assert_steps, share_of
from torch.nn.functional import cross_entropy

from medfedaug.models import (
    FFALayer,
    build_network,
    insert_ffa,
    insert_layers,
    remove_ffa,
    remove_layers,
    stage_layers,
)
from medfedaug.models.stages import known_stages
from medfedaug.research.methods.manifold_mixup import FeatureMixLayer
from medfedaug.research.methods.mixstyle import MixStyleLayer
from medfedaug.research.methods.moex import MomentExchangeLayer


def mixed(z, share, order):
    """Each image with a share of another's statistics."""
    mean = z.mean((2, 3), keepdim=True)
    std = ((z - mean).square().mean((2, 3), keepdim=True) + 1e-6).sqrt().detach()
    mean, share = mean.detach(), share[..., None, None]
    normal = (z - mean) / std
    return normal * (share * std + (1 - share) * std[order]) + share * mean + (1 - share) * mean[order]


def test_features_take_on_a_share_of_another_images_style(federate):
    run = federate("mixstyle", plan=UNEVEN, settings={"mixstyle": {"alpha": 0.5}}, local_epochs=2)
    active = []

    def step(network, x, y, draws):
        z = x
        for stage in network.encoder:
            z = stage(z)
            active.append(float(draws.pop(0)) < 0.5)
            if not active[-1]:
                continue
            z = mixed(z, share_of(draws.pop(0)), draws.pop(0))
        return cross_entropy(network.head(z), y)

    assert_steps(run, step)
    assert {True, False} == set(active)


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


@pytest.mark.parametrize("kind", [MixStyleLayer, MomentExchangeLayer, FeatureMixLayer])
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
