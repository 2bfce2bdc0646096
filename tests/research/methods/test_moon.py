"""MOON against Li, He and Song, CVPR 2021, Eq. 3 and 4."""

from __future__ import annotations

import pytest
import torch
from reference import UNEVEN, assert_models, copied, descend, federated_averaging, same
from small_networks import SEGMENTING
from torch import nn

from medfedaug.federation import run_in_process
from medfedaug.methods.base import Step
from medfedaug.research.methods.moon import MOON, MOONSite

SITES = ["site_A", "site_B"]
WEIGHT, TEMPERATURE = 3.0, 0.4


def features(network, x):
    """The input of the last layer of `reference.convolutional`."""
    for stage in network.encoder:
        x = stage(x)
    return x.mean(dim=(2, 3))


def cosine(a, b):
    return (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))


def test_features_are_drawn_to_the_global_model_and_away_from_the_sites_last_one(federate, tmp_path):
    run = federate(
        "moon",
        plan=UNEVEN,
        settings={"moon": {"weight": WEIGHT, "temperature": TEMPERATURE}},
        network="reference_convolutional",
        states=tmp_path / "states",
        local_epochs=2,
    )
    previous, values = {}, []

    def train(site, round_, network):
        received, last = copied(network).eval(), previous.get(site)
        seen = {}
        handle = network.head[2].register_forward_pre_hook(lambda _, args: seen.update(z=args[0]))

        def term(_net, x, _y):
            if last is None:
                return 0.0
            with torch.no_grad():
                near, far = (features(one, x) for one in (received, last))
            near, far = (torch.exp(cosine(seen["z"], z) / TEMPERATURE) for z in (near, far))
            result = -torch.log(near / (near + far)).mean()
            values.append((site, round_, float(result.detach())))
            return WEIGHT * result

        descend(network, run.batches[site, round_], 0.05, term)
        handle.remove()
        previous[site] = copied(network).eval()

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    for round_, record in enumerate(run.server.rounds, start=1):
        for site, metrics in record["sites"].items():
            expected = [value for s, r, value in values if (s, r) == (site, round_)]
            if round_ == 1:
                assert "moon/contrast" not in metrics
            elif site in run.took_part(round_):
                assert metrics["moon/contrast"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_of_a_feature_map_the_mean_over_space_is_compared():
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Conv2d(3, 2, 1))
    site = MOONSite(MOON(weight=2.0), network)
    torch.manual_seed(0)
    site.start_round()
    site.end_round()
    with torch.no_grad():
        network[0].weight.add_(torch.randn_like(network[0].weight))
    site.start_round()
    received = copied(network)
    with torch.no_grad():
        network[0].weight.add_(torch.randn_like(network[0].weight))
    network.train()
    network[2].eval()  # a layer that is not trained stays as it is
    x = torch.rand(4, 1, 6, 6)
    step = Step(network, x, x, network(x))
    site.after_pass(step)
    result = site.loss(step)
    previous = copied(network, site.previous)
    z, near, far = (net[:2](x).mean(dim=(2, 3)) for net in (network, received, previous))
    near, far = torch.exp(cosine(z, near) / 0.5), torch.exp(cosine(z, far) / 0.5)
    torch.testing.assert_close(result, 2 * -torch.log(near / (near + far)).mean())
    assert [module.training for module in network] == [True, True, False, True]
    assert all(p.grad is None for p in network.parameters())


def test_the_features_are_those_of_the_step_beside_a_method_with_another_pass(phantom_dir, tiny_config):
    """FedFD's second pass through the network comes between."""
    runs = [
        run_in_process(tiny_config(order), phantom_dir, SITES, "cpu")
        for order in ("moon,fedfd", "fedfd,moon")
    ]
    first, second = (run.rounds[1]["sites"]["site_A"]["moon/contrast"] for run in runs)
    assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("method", ["moon", "ditto"])
def test_a_network_in_which_a_module_has_two_names_is_trained(phantom_dir, tiny_config, method):
    """Passes under other weights leave nothing in the network."""
    size = {"rounds": 2, "limit": 1, "network": "dynunet", "image_size": 32}
    size["network_args"] = {**SEGMENTING["dynunet"], "norm": "batch"}
    settings = {"moon": {"weight": 1e-30}} if method == "moon" else None
    idle = run_in_process(tiny_config(method, settings=settings, **size), phantom_dir, SITES, "cpu")
    plain = run_in_process(tiny_config("fedavg", **size), phantom_dir, SITES, "cpu")
    assert same(idle.state, plain.state)
