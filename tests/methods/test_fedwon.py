"""FedWon against Zhuang and Lyu, ICLR 2024: no norm layers, and standardised weights."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from reference import UNEVEN, assert_models, federated_averaging, same
from torch import nn
from torch.func import functional_call
from torch.nn.functional import conv2d, cross_entropy, linear

from medfedaug.errors import ConfigError
from medfedaug.methods import FedWon, build_methods
from medfedaug.methods.base import SiteContext, Step
from medfedaug.models.weight_standardisation import remove_norms, standardise_weights, standardised

RELU = math.sqrt(2) / math.sqrt(1 - 1 / math.pi)


def by_channel(weight, gain, dim=0):
    """γ (W − μ) / (σ √N), one output channel after the other."""
    rows = [
        gain * (row - row.mean()) / (row.std(unbiased=False) * math.sqrt(row.numel()))
        for row in weight.unbind(dim)
    ]
    return torch.stack(rows, dim)


def is_norm(key):
    return key.startswith("encoder") and key.split(".")[2] == "1"


def without_norms(network, x, gain):
    """`reference.convolutional` as FedWon has it."""
    for stage in network.encoder:
        x = conv2d(x, by_channel(stage[0].weight, gain), stage[0].bias, padding=1)
        x = torch.tanh(x).unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(4, 5))
    return linear(x.mean(dim=(2, 3)), network.head[2].weight, network.head[2].bias)


def clipped(weight, gradient, ratio):
    """Adaptive gradient clipping, one output channel after the other."""
    if weight.ndim == 1:
        weight, gradient = weight[None], gradient[None]
        return clipped(weight, gradient, ratio)[0]
    rows = []
    for w, g in zip(weight, gradient, strict=True):
        most = ratio * max(float(w.norm()), 1e-3)
        rows.append(g * most / g.norm() if float(g.norm()) > most else g)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"plan": UNEVEN}),
        ({"gain": 1.3, "clip": 0.02}, {"plan": UNEVEN}),
        ({}, {"sizes": {"A": 5, "B": 5}, "batch_size": 1, "rounds": 1}),
    ],
    ids=["as published", "clipped", "batches of one image"],
)
def test_the_network_has_standardised_weights_and_no_norms(federate, settings, options):
    run = federate("fedwon", settings={"fedwon": settings}, network="reference_convolutional", **options)
    gain, ratio = settings.get("gain", RELU), settings.get("clip")
    moved = []

    def train(site, round_, network):
        named = {key: p for key, p in network.named_parameters() if not is_norm(key)}
        for x, y in run.batches[site, round_]:
            loss = cross_entropy(without_norms(network, x, gain), y)
            gradients = torch.autograd.grad(loss, list(named.values()))
            with torch.no_grad():
                for (key, p), g in zip(named.items(), gradients, strict=True):
                    if ratio and not key.startswith("head"):
                        moved.append(not torch.equal(clipped(p, g, ratio), g))
                        g = clipped(p, g, ratio)
                    p -= 0.05 * g

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    assert any(moved) == bool(ratio)
    norms = [key for key in run.models[0] if is_norm(key)]
    assert len(norms) == 8
    assert same({k: run.models[-1][k] for k in norms}, {k: run.models[0][k] for k in norms})


def of_outputs(conv):
    """Yield the place of each output channel in a transposed convolution's weights, (in, out/groups, ...)."""
    inputs, outputs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    for group in range(conv.groups):
        for output in range(outputs):
            yield slice(group * inputs, (group + 1) * inputs), output


GROUPED = [(6, 4, 2), (3, 2, 1)]  # channels in and out, groups


@pytest.mark.parametrize(("inputs", "outputs", "groups"), GROUPED)
def test_transposed_convolutions_are_standardised_by_output_channel(inputs, outputs, groups):
    torch.manual_seed(0)
    conv = nn.ConvTranspose2d(inputs, outputs, 3, groups=groups).double()
    net, plain = nn.Sequential(conv), copy.deepcopy(conv)
    assert standardise_weights(net, gain=1.5) == 1
    with torch.no_grad():
        for place in of_outputs(plain):
            part = plain.weight[place]
            part.copy_(by_channel(part[None], 1.5)[0])
    x = torch.rand(2, inputs, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(net(x), plain(x))
    # A single weight to each output channel leaves nothing to standardise.
    alone = nn.ConvTranspose2d(inputs, inputs * outputs, 1, groups=inputs)
    assert standardise_weights(alone) == 0


@pytest.mark.parametrize(("inputs", "outputs", "groups"), GROUPED)
def test_transposed_convolutions_are_clipped_by_output_channel(inputs, outputs, groups):
    torch.manual_seed(0)
    conv = nn.ConvTranspose2d(inputs, outputs, 2, groups=groups)
    net = nn.Sequential(conv, nn.Conv2d(outputs, 1, 1))
    (method,) = build_methods([{"name": "fedwon", "args": {"clip": 0.1}}])
    part = method.at_site(SiteContext("A", method.prepare_network(net)))
    size = torch.logspace(-3, 0, inputs).reshape(-1, 1, 1, 1)
    gradient = torch.rand_like(conv.weight) * size
    conv.weight.grad = gradient.clone()
    part.before_step(Step(net, *[torch.zeros(())] * 3))
    expected = gradient.clone()
    for place in of_outputs(conv):
        expected[place] = clipped(
            conv.weight.detach()[place].reshape(1, -1), gradient[place].reshape(1, -1), 0.1
        ).reshape(gradient[place].shape)
    torch.testing.assert_close(conv.weight.grad, expected)
    assert not torch.equal(expected, gradient)


@pytest.mark.parametrize("dims", [2, 3])
def test_convolutions_of_all_kinds(dims):
    torch.manual_seed(0)
    conv, transposed = (nn.Conv2d, nn.ConvTranspose2d) if dims == 2 else (nn.Conv3d, nn.ConvTranspose3d)
    net = nn.Sequential(conv(2, 4, 3), nn.GroupNorm(2, 4), transposed(4, 6, 2, 2), conv(6, 6, 3, groups=6))
    net.append(conv(6, 1, 1))
    net.double()
    plain, keys = copy.deepcopy(net), list(net.state_dict())
    assert remove_norms(net) == 1
    assert standardise_weights(net, gain=1.5, leave=[net[4]]) == 3
    x = torch.rand(2, 2, *(8,) * dims, dtype=torch.float64)
    expected = copy.deepcopy(plain)
    with torch.no_grad():
        for number, dim in ((0, 0), (2, 1), (3, 0)):
            expected[number].weight.copy_(by_channel(plain[number].weight, 1.5, dim))
        expected[1] = nn.Identity()
    torch.testing.assert_close(net(x), expected(x))
    assert list(net.state_dict()) == keys
    assert same(net.state_dict(), plain.state_dict())  # the trained weights are those before
    # A copy has its own weights, and so has a call with other ones.
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].weight.mul_(-1)
    torch.testing.assert_close(net(x), expected(x))
    arguments = {key: value.clone() for key, value in other.state_dict().items()}
    torch.testing.assert_close(functional_call(net, arguments, (x,)), other(x))
    assert not torch.allclose(other(x), net(x))


def test_a_single_weight_and_equal_weights():
    net = nn.Conv2d(1, 3, 1)
    assert standardise_weights(net) == 0
    assert torch.equal(standardised(torch.ones(2, 3, 3)), torch.zeros(2, 3, 3))
    w = torch.rand(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(standardised, w)


def test_fedwon_refuses_unsuitable_networks():
    with pytest.raises(ConfigError, match="Sequential has layer norms"):
        FedWon().prepare_network(nn.Sequential(nn.Conv2d(1, 2, 3), nn.LayerNorm(3), nn.Linear(3, 2)))
    with pytest.raises(ConfigError, match="has no convolutions before its last layer"):
        FedWon().prepare_network(nn.Sequential(nn.Conv2d(3, 2, 1)))
