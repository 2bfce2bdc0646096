"""FedFD and FedFD-A in whole federations, against Eq. 1 to 7 of their paper, with the draws of the run."""

from __future__ import annotations

import pytest
import torch
from reference import UNEVEN, assert_models, assert_same, federated_averaging, mean, step_down
from torch.nn.functional import avg_pool2d, cross_entropy

STATISTICS = ("running_mean", "running_var")
L1, L2 = 0.3, 0.5


def layers(network):
    return [(f"encoder.{i}.1", stage[0], stage[1]) for i, stage in enumerate(network.encoder)]


def normalised(z, norm, mean_, std):
    """With statistics of each image, (B, C) or (C,)."""
    shape = (-1, z.shape[1], 1, 1)
    normal = (z - mean_.reshape(shape)) / std.reshape(shape)
    return normal * norm.weight.reshape(1, -1, 1, 1) + norm.bias.reshape(1, -1, 1, 1)


def own_statistics(z, norm):
    centred = z - z.mean((2, 3), keepdim=True)
    return z.mean((2, 3)), (centred.square().mean((2, 3)) + norm.eps).sqrt()


def interpolated_features(network, x, shared, mix):
    """The features with every norm's statistics between the image's own and the federation's."""
    z = x
    for name, convolution, norm in layers(network):
        z = convolution(z)
        own = own_statistics(z, norm)
        mean_g, var_g = (shared[f"{name}.{entry}"] for entry in STATISTICS)
        z = normalised(z, norm, *mix(name, own, (mean_g, (var_g + norm.eps).sqrt())))
        z = avg_pool2d(torch.tanh(z), 2)
    return z.mean((2, 3))


def features(network, x):
    return network.encoder(x).mean((2, 3))


def diversified_loss(network, x, y, shared, draws):
    """Eq. 2 to 5, the distance as a mean over the channels."""
    f = features(network, x)
    head = network.head[2]
    own = cross_entropy(head(f), y)
    if shared is None:
        return own

    def mix(_name, own, federation):
        u = draws.pop(0).double()
        return tuple(u * mine + (1 - u) * theirs for mine, theirs in zip(own, federation, strict=True))

    changed = interpolated_features(network, x, shared, mix)
    distance = (f - changed).square().sum(1).mean() / f.shape[1]
    return (1 - L1) * own + L1 * cross_entropy(head(changed), y) + L2 * distance


@pytest.mark.parametrize("beside", ["", ",silobn"])
def test_fedfd(federate, beside):
    settings = {"fedfd": {"lambda1": L1, "lambda2": L2}}
    network = {"network": "reference_convolutional", "local_epochs": 2}
    run = federate(f"fedfd{beside}", plan=UNEVEN, settings=settings, **network)
    shared, sent = {0: None}, {}

    def train(site, round_, net):
        if round_ not in shared and round_ > 1:  # what the server made of the round before
            sites = sent[round_ - 1]
            shared.setdefault(
                round_ - 1, mean(list(sites.values()), [run.server.sites[name] for name in sites])
            )
        net.train()
        batches = run.batches[site, round_]
        for (x, y), draws in zip(batches, batches.draws, strict=True):
            step_down(net, diversified_loss(net, x, y, shared[round_ - 1], list(draws)), 0.05)
        sent.setdefault(round_, {})[site] = {
            f"{name}.{entry}": getattr(norm, entry).clone()
            for name, _, norm in layers(net)
            for entry in STATISTICS
        }

    keeps = (lambda key: key.endswith(STATISTICS)) if beside else (lambda key: False)
    assert_models(run, federated_averaging(run, train, keeps), atol=2e-6)
    assert_same(
        {key.removeprefix("fedfd/"): value for key, value in run.requests[3].payload.items()}, shared[2]
    )


def test_fedfd_a(federate):
    """The main network as in FedFD; after each of its steps one of the adapters, z drawn for each image."""
    settings = {"fedfd_a": {"lambda1": L1, "lambda2": L2, "adapter_lr": 0.1, "adapter_momentum": 0.5}}
    run = federate(
        "fedfd_a", plan=UNEVEN, settings=settings, network="reference_convolutional", local_epochs=2
    )
    adapters, shared, sent = {}, {0: None}, {}

    def alpha(name, own, federation, z, weights):
        difference = torch.cat([mine - theirs for mine, theirs in zip(own, federation, strict=True)], dim=1)
        hidden = (
            difference @ weights[f"{name}.adapter.hidden_weight"].T + weights[f"{name}.adapter.hidden_bias"]
        ).relu()
        out = hidden @ weights[f"{name}.adapter.out_weight"].T + weights[f"{name}.adapter.out_bias"]
        return (z * out[:, :1] + out[:, 1:]).clamp(0, 1)

    def train(site, round_, net):
        if round_ > 1:
            sites = sent[round_ - 1]
            weights = [run.server.sites[one] for one in sites]
            shared.setdefault(round_ - 1, mean([one[0] for one in sites.values()], weights))
            adapters.setdefault(round_, mean([one[1] for one in sites.values()], weights))
        batches = run.batches[site, round_]
        statistics = shared[round_ - 1]
        own_adapters = {
            key: value.clone().requires_grad_() for key, value in adapters.get(round_, {}).items()
        }
        velocity = {}
        for (x, y), drawn in zip(batches, batches.draws, strict=True):
            draws = list(drawn)
            net.train()
            step_down(net, diversified_loss(net, x, y, statistics, draws), 0.05)
            if statistics is None:
                continue
            net.eval()

            def mix(name, own, federation, draws=draws):
                a = alpha(name, own, federation, draws.pop(0).double(), own_adapters)
                return tuple(
                    a * mine + (1 - a) * theirs for mine, theirs in zip(own, federation, strict=True)
                )

            loss = cross_entropy(net.head[2](interpolated_features(net, x, statistics, mix)), y)
            gradients = torch.autograd.grad(loss, list(own_adapters.values()))
            with torch.no_grad():
                for (key, value), gradient in zip(own_adapters.items(), gradients, strict=True):
                    velocity[key] = 0.5 * velocity.get(key, 0.0) + gradient
                    value -= 0.1 * velocity[key]
        norms = {
            f"{name}.{entry}": getattr(norm, entry).clone()
            for name, _, norm in layers(net)
            for entry in STATISTICS
        }
        if round_ == 1:  # untouched, and the same at all sites: what the network was built with
            payload = run.replies[1][site].payload
            own_adapters = {
                key.removeprefix("fedfd_a/"): value.double()
                for key, value in payload.items()
                if ".adapter." in key
            }
            assert len(own_adapters) == 8
        sent.setdefault(round_, {})[site] = (norms, {k: v.detach() for k, v in own_adapters.items()})

    rounds = federated_averaging(run, train)
    assert_models(run, rounds, atol=2e-6)
    for round_ in (2, 3):
        for site, (norms, weights) in sent[round_].items():
            found = {k.removeprefix("fedfd_a/"): v for k, v in run.replies[round_][site].payload.items()}
            assert_same(found, {**norms, **weights}, atol=5e-6)
