"""FedFD-A: the adapters; `test_fedfd` tests the rest."""

import torch
from fedfd_loop import L1, L2, SITES, STATISTICS, diversified_loss, interpolated_features, layers
from reference import UNEVEN, assert_models, assert_same, federated_averaging, mean, step_down
from torch.nn.functional import cross_entropy

from medfedaug.federation import run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.models import instance_adapters


def test_adapters_train_in_a_round_and_nothing_else_does_for_them(tiny_config, phantom_dir):
    """FedFD-A without diversification trains the network exactly as FedAvg, and also the adapters."""

    def after_two_rounds(methods, settings=None):
        config = tiny_config(methods, settings=settings, optimizer="sgd", learning_rate=0.05)
        server = run_in_process(config, phantom_dir, SITES[:2], "cpu")
        return server

    plain = after_two_rounds("fedavg")
    adapted = after_two_rounds("fedfd_a", {"fedfd_a": {"lambda1": 0, "lambda2": 0, "adapter_lr": 0.5}})
    assert all(torch.equal(plain.state[key], value) for key, value in adapted.state.items())
    start = Composition(adapted.config).network
    for name, adapter in instance_adapters(start).items():
        received = adapted.payload[f"fedfd_a/{name}.adapter.out_bias"]
        assert not torch.equal(received, adapter.out_bias), name
    assert "fedfd_a/adapter_loss" in adapted.rounds[1]["sites"]["site_A"]


def test_each_step_of_the_network_is_followed_by_one_of_the_adapters(federate):
    """The main network as in FedFD; after each of its steps one of the adapters, z drawn for each image."""
    settings = {"fedfd_a": {"lambda1": L1, "lambda2": L2, "adapter_lr": 0.1, "adapter_momentum": 0.5}}
    run = federate("fedfd_a", plan=UNEVEN, settings=settings, local_epochs=2)
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
            values = {k.removeprefix("fedfd_a/"): v for k, v in run.replies[round_][site].payload.items()}
            assert_same(values, {**norms, **weights}, atol=5e-6)
