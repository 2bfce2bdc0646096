"""BIN against Nam and Kim, NeurIPS 2018."""

import copy

import pytest
import torch
from reference import UNEVEN, Round, assert_models, assert_same, copied, entries, mean
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy

from medfedaug.errors import ConfigError
from medfedaug.models import build_network
from medfedaug.research.methods.bin import BIN, batch_shares, mix_instance_norms


def mixed(z, norm, rho, training=True):
    """ρ of the batch's statistics and 1 - ρ of each image's."""
    dims, shape = (0, *range(2, z.dim())), (-1, *[1] * (z.dim() - 2))
    mu, var = norm.running_mean, norm.running_var
    if training:
        mu, var, n = z.mean(dims), z.var(dims, unbiased=False), z.numel() / z.shape[1]
        with torch.no_grad():
            norm.running_mean.mul_(0.9).add_(0.1 * mu)
            norm.running_var.mul_(0.9).add_(0.1 * var * n / (n - 1))
    space = dims[1:]
    own, spread = z.mean(space, keepdim=True), z.var(space, unbiased=False, keepdim=True)
    batch = (z - mu.reshape(shape)) / (var.reshape(shape) + norm.eps).sqrt()
    instance = (z - own) / (spread + norm.eps).sqrt()
    rho = rho.reshape(shape)
    return (rho * batch + (1 - rho) * instance) * norm.weight.reshape(shape) + norm.bias.reshape(shape)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_the_norm_is_its_equation(dims, training):
    torch.manual_seed(dims)
    norm = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](3).double().train(training)
    with torch.no_grad():
        norm.weight.uniform_(-1, 1), norm.bias.uniform_()
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    plain, net = copy.deepcopy(norm), mix_instance_norms(nn.Sequential(norm))
    x = (torch.randn(4, 3, *[5, 4, 3][:dims]) * 2 + 1).double()
    torch.testing.assert_close(net(x), copy.deepcopy(plain)(x))  # ρ = 1 at first
    (rho,) = batch_shares(net).values()
    with torch.no_grad():
        rho.copy_(torch.tensor([0.0, 0.3, 1.0]))
    x.requires_grad_()
    reference = copy.deepcopy(norm)
    result, expected = net(x), mixed(x, reference, rho, training)
    torch.testing.assert_close(result, expected)
    along = torch.randn_like(result)
    for one, other in zip(
        torch.autograd.grad(result, (x, rho, norm.weight), along),
        torch.autograd.grad(expected, (x, rho, reference.weight), along),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(norm.running_var, reference.running_var)


def test_the_network_keeps_its_entries_and_a_copy_has_its_own_shares():
    net = build_network("resnet18", in_channels=3, out_channels=2)
    keys = list(net.state_dict())
    other = copy.deepcopy(BIN().prepare_network(net))
    assert list(net.state_dict()) == keys
    assert len(batch_shares(net)) == 20
    assert not {id(rho) for rho in batch_shares(net).values()} & {id(rho) for rho in other.parameters()}
    with pytest.raises(ConfigError, match="no batch norm with running statistics"):
        BIN().prepare_network(nn.Conv2d(3, 2, 1))
    with pytest.raises(ConfigError, match="rate must be positive"):
        BIN(rate=0)


def by_hand(run, rate):
    """Rounds, and the averages of ρ after each."""
    start, rounds = run.network(), []
    model = entries(start)
    shared = {
        f"encoder.{i}.1": torch.ones(stage[1].num_features).double() for i, stage in enumerate(start.encoder)
    }
    for round_ in range(1, run.config.rounds + 1):
        local, owns = {}, []
        for site in run.took_part(round_):
            network = copied(start, model).train()
            own = {key: value.clone().requires_grad_() for key, value in shared.items()}
            for x, y in run.batches[site, round_]:
                z = x
                for stage, rho in zip(network.encoder, own.values(), strict=True):
                    z = avg_pool2d(torch.tanh(mixed(stage[0](z), stage[1], rho)), 2)
                trained = [*network.parameters(), *own.values()]
                gradients = torch.autograd.grad(cross_entropy(network.head(z), y), trained)
                with torch.no_grad():
                    for parameter, gradient in zip(trained, gradients, strict=True):
                        faster = rate if any(parameter is rho for rho in own.values()) else 1.0
                        parameter.sub_(run.config.learning_rate * faster * gradient)
                    for rho in own.values():
                        rho.clamp_(0, 1)
            local[site] = entries(network)
            owns.append({key: value.detach() for key, value in own.items()})
        weights = [run.server.sites[site] for site in local]
        model, shared = mean(list(local.values()), weights), mean(owns, weights)
        rounds.append(Round(model, local))
    return rounds, shared


def test_shares_are_trained_with_the_network_clipped_and_averaged(federate):
    rate = 20.0
    options = {"plan": UNEVEN, "settings": {"bin": {"rate": rate}}}
    run = federate("bin", **options)
    rounds, shared = by_hand(run, rate)
    assert_models(run, rounds)
    values = {key.removeprefix("bin/"): value for key, value in run.server.payload.items()}
    assert_same(values, shared)
    assert all(bool(((rho >= 0) & (rho <= 1)).all()) for rho in values.values())
    assert any(bool((rho < 0.9999).any()) for rho in values.values())
