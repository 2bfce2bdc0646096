"""Batch norms that interpolate, against FedFD's equations written out in float64."""

import copy
import pickle

import pytest
import torch
from torch import nn

from medfedaug.models import (
    build_network,
    insert_ffa,
    insert_instance_adapters,
    instance_adapters,
    training_adapters,
)
from medfedaug.models.adaptation import LearnedAlpha, RandomMix, adapt_batch_norm, interpolating


def lively_norm(channels=3, dims=2, seed=0):
    """An adaptive batch norm in which nothing is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels).double()
    for tensor, low in ((norm.weight, -1), (norm.bias, -1), (norm.running_mean, -1), (norm.running_var, 0.5)):
        tensor.data.uniform_(low, 2, generator=generator)
    net = adapt_batch_norm(nn.Sequential(norm))
    return net, net[0]


def features(shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(shape[:2], generator=generator, dtype=torch.float64) * 3 + 0.2
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x * spread.reshape(*shape[:2], *[1] * (len(shape) - 2)) + 0.7


def written_out(x, norm, weight_of_own, mean_g, var_g):
    """Eq. 2 and 6: normalise every image with u·own + (1 − u)·federation's."""
    result = torch.empty_like(x)
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            values, u = x[b, c], weight_of_own[b, c]
            own_mean = values.sum() / values.numel()
            own_std = (((values - own_mean) ** 2).sum() / values.numel() + norm.eps).sqrt()
            mean = u * own_mean + (1 - u) * mean_g[c]
            std = u * own_std + (1 - u) * (var_g[c] + norm.eps).sqrt()
            result[b, c] = norm.weight[c] * (values - mean) / std + norm.bias[c]
    return result


@pytest.mark.parametrize("shape", [(2, 3, 4, 3, 5), (1, 3, 7, 7)])
def test_a_mixed_pass_is_equation_2_with_one_u_a_channel(shape):
    net, norm = lively_norm(dims=len(shape) - 2)
    mean_g, var_g = torch.tensor([0.3, -1.0, 2.0]).double(), torch.tensor([0.4, 2.0, 1.5]).double()
    norm.set_global_statistics(mean_g, var_g)
    x, before = features(shape), copy.deepcopy(norm.state_dict())
    net.train()
    torch.manual_seed(3)
    with interpolating(net, RandomMix()):
        result = net(x)
    torch.manual_seed(3)
    u = torch.empty(3, dtype=torch.float64).uniform_()
    expected = written_out(x, norm, u.expand(shape[0], 3), mean_g, var_g)
    torch.testing.assert_close(result, expected)
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())


def test_without_interpolation_nothing_changes():
    torch.manual_seed(0)
    plain = build_network("resnet18", in_channels=3, out_channels=4)
    net = adapt_batch_norm(copy.deepcopy(plain))
    x = torch.randn(4, 3, 48, 48)
    assert list(net.state_dict()) == list(plain.state_dict())
    for mode in (True, False):
        assert torch.equal(net.train(mode)(x), plain.train(mode)(x))
    with interpolating(net, LearnedAlpha()):  # the federation's alone are the running ones here
        torch.testing.assert_close(net(x), plain(x), rtol=1e-4, atol=1e-4)


def test_features_without_extent_are_mixed_with_the_statistics_of_the_batch():
    net, norm = lively_norm(dims=1)
    x = features((5, 3, 1))[..., 0]
    norm.set_global_statistics(torch.tensor([0.3, -1.0, 2.0]), torch.tensor([0.4, 2.0, 1.5]))
    torch.manual_seed(3)
    with interpolating(net, RandomMix()):
        result = net.train()(x)
    torch.manual_seed(3)
    u = torch.empty(1, 3, dtype=torch.float64).uniform_()
    (expected,) = written_out(x.t()[None], norm, u, norm.global_mean, norm.global_var)
    torch.testing.assert_close(result, expected.t())
    with interpolating(net, LearnedAlpha()):  # one image at inference has no statistics: the federation's
        one = net(x[:1])
    expected = norm.weight * (x[:1] - norm.global_mean) / (norm.global_var + norm.eps).sqrt() + norm.bias
    torch.testing.assert_close(one, expected)


def interpolated(net, how, x):
    with torch.no_grad(), interpolating(net, how):
        return net.eval()(x)


# ---------------------------------------------------------------- adapters


def moved_adapters(net, seed=5):
    """Adapters that no longer stand at their start."""
    generator = torch.Generator().manual_seed(seed)
    for adapter in instance_adapters(net).values():
        adapter.hidden_bias.data.fill_(2.0)  # so that hardly a unit is off
        adapter.out_weight.data.normal_(0, 0.05, generator=generator)
        adapter.out_bias.data.copy_(torch.tensor([0.3, 0.4]))
    return net


@pytest.mark.parametrize("noise", [False, True])
def test_an_adapted_pass_is_equations_6_and_7(noise):
    norm = nn.BatchNorm2d(32).double()
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    net = moved_adapters(insert_instance_adapters(nn.Sequential(norm)).double())
    (adapter,) = instance_adapters(net).values()
    x = features((5, 32, 4, 4))
    torch.manual_seed(7)
    result = interpolated(net, LearnedAlpha(noise), x)
    torch.manual_seed(7)
    z = torch.randn(5, 1, dtype=torch.float64) if noise else torch.zeros(5, 1).double()
    alphas = []
    for b in range(5):
        mean = x[b].mean(dim=(1, 2))
        std = (((x[b] - mean[:, None, None]) ** 2).mean(dim=(1, 2)) + norm.eps).sqrt()
        std_g = (norm.running_var + norm.eps).sqrt()
        difference = torch.cat([mean - norm.running_mean, std - std_g])
        hidden = (adapter.hidden_weight @ difference + adapter.hidden_bias).clamp_min(0)
        delta, epsilon = adapter.out_weight @ hidden + adapter.out_bias
        alphas.append(min(max(float(z[b] * delta + epsilon), 0.0), 1.0))
    assert len(set(alphas)) > 2  # it differs by image
    own = torch.tensor(alphas).double()[:, None].expand(5, 32)
    expected = written_out(x, norm, own, norm.running_mean, norm.running_var)
    torch.testing.assert_close(result, expected)


def test_a_resnet_18_gains_as_many_parameters_as_the_paper_says():
    net = build_network("resnet18", in_channels=3, out_channels=7)
    plain, keys = sum(p.numel() for p in net.parameters()), list(net.state_dict())
    insert_instance_adapters(net)
    gained = sum(p.numel() for p in net.parameters()) - plain
    assert gained == sum(2 * c * (c // 16) + c // 16 + 2 * (c // 16) + 2 for c in 5 * [64, 128, 256, 512])
    assert round(gained / 1e6, 2) == round(11.53 - 11.31, 2)
    assert list(net.state_dict()) == keys
    net.load_state_dict(build_network("resnet18", in_channels=3, out_channels=7).state_dict())


def test_the_network_stands_still_while_the_adapters_train_and_the_other_way_round():
    torch.manual_seed(0)
    net = insert_instance_adapters(build_network("lenet5", in_channels=3, out_channels=4))
    insert_ffa(net)
    net.train()
    x, y = torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    adapters = [p for adapter in instance_adapters(net).values() for p in adapter.parameters()]

    def snapshot(tensors):
        return [t.detach().clone() for t in tensors]

    def same(before, tensors):
        return all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))

    network = list(net.state_dict().values()) + [b for _, b in net.named_buffers()]
    before, adapters_before = snapshot(network), snapshot(adapters)
    with training_adapters(net) as parameters:
        gradients = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), parameters)
    torch.optim.SGD(adapters, lr=0.1)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.data -= 0.1 * gradient
    assert same(before, network)
    assert not same(adapters_before, adapters)
    assert all(p.grad is None for p in net.parameters())
    assert all(module.training for module in net.modules())

    adapters_before = snapshot(adapters)
    trainable = [p for p in net.parameters() if p.requires_grad]
    assert not {id(p) for p in trainable} & {id(p) for p in adapters}
    optimiser = torch.optim.SGD(trainable, lr=0.1)
    nn.functional.cross_entropy(net(x), y).backward()
    optimiser.step()
    assert same(adapters_before, adapters)
    assert not same(before, network)


def test_adapters_survive_copies():
    torch.manual_seed(0)
    net = build_network("basicunet", features=(4, 8, 8, 8, 8, 4))
    plain, x = copy.deepcopy(net).eval(), torch.rand(2, 1, 32, 32)
    moved_adapters(insert_instance_adapters(net)).eval()
    with torch.no_grad():
        adapted = net(x)
        assert not torch.allclose(adapted, plain(x))
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert torch.equal(other(x), adapted)


def test_what_cannot_be_adapted_says_why():
    with pytest.raises(ValueError, match=r"BasicUNet has no batch norm.*norm='batch'"):
        insert_instance_adapters(build_network("basicunet", norm="instance"))
    with pytest.raises(ValueError, match="no batch norm with running"):
        adapt_batch_norm(nn.BatchNorm2d(2, track_running_stats=False))
