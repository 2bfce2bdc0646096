"""Hostile sites among five: what a cap on shares and robust methods leave of their attacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from robustness_script import script as script

from medfedaug.data.phantom import make_phantom
from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.functional.weighted_mean import capped_weights

SITES = [f"site_{letter}" for letter in "ABCDE"]
ROBUST = {"median": ({}, 2), "trimmed_mean": ({"hostile": 2}, 2)}
"""Arguments, and how many of five sites the method stands."""


@pytest.fixture(scope="module")
def five(tmp_path_factory, script):
    """Five phantom sites, and the same with their labels exchanged."""
    root = tmp_path_factory.mktemp("five")
    make_phantom(root / "data", sites=5, patients=3, shape=(16, 16, 4), seed=0)
    return root / "data", script.flipped(root / "data", root / "flipped", 2)


@pytest.fixture
def attacked(script, five, tiny_config) -> Callable:
    """A run with hostile sites: its server, and by round what each site sent, as it arrived."""

    def run(methods, attack, liars, settings=None, **changes):
        from medfedaug.data.sites import find_sites

        data, false = five
        names = {"network": "unet", "network_args": {"channels": [4, 8], "strides": [2], "norm": "batch"}}
        config = tiny_config(methods, settings=settings, **names, **changes)
        others = {folder.name: folder for folder in find_sites(false)}
        folders = find_sites(data)
        if attack == "label flip":
            folders = [others[f.name] if f.name in liars else f for f in folders]
        sent: list[dict] = []

        class Watched(script.hostile(script.ATTACKS[attack], liars)):
            def ask(self, request, sites, needed, accept):
                if request.task == TRAIN:
                    sent.append({})

                def see(name, reply):
                    if request.task == TRAIN:
                        sent[-1][name] = {k: v.double() for k, v in reply.weights.items()}
                    return accept(name, reply)

                return super().ask(request, sites, needed, see)

        return run_in_process(config, data, folders, "cpu", carrier=Watched), sent

    return run


def outside(server, models, liars) -> float:
    """The share of the averaged entries that lie outside the range of the honest sites' own."""
    honest = [model for site, model in models.items() if site not in liars]
    count = total = 0
    for key in server.shared:
        values = torch.stack([model[key] for model in honest])
        margin = 1e-6 + 1e-6 * values.abs().amax(dim=0)
        value = server.state[key].double()
        count += int(((value < values.amin(0) - margin) | (value > values.amax(0) + margin)).sum())
        total += value.numel()
    return count / total


@pytest.mark.parametrize("attack", ["sign flip", "hijack"])
@pytest.mark.parametrize("method", ROBUST)
def test_the_model_stays_within_the_range_of_the_honest_sites(attacked, method, attack):
    arguments, most = ROBUST[method]
    liars = SITES[:most]
    server, sent = attacked(method, attack, liars, {method: arguments}, rounds=1)
    assert not server.rounds[-1]["refused"]
    assert set(sent[-1]) == set(SITES)
    assert outside(server, sent[-1], liars) == 0


@pytest.mark.parametrize("attack", ["sign flip", "hijack"])
def test_the_mean_leaves_the_range_of_the_honest_sites(attacked, attack):
    """So that the test above can fail."""
    server, sent = attacked("fedavg", attack, SITES[:1], rounds=1)
    assert outside(server, sent[-1], SITES[:1]) > 0.05


@pytest.mark.parametrize("attack", ["scaling", "scaling back"])
def test_a_step_twenty_times_as_long_counts_as_twice_the_others(attacked, attack):
    liar = SITES[0]
    server, (sent,) = attacked("fedavg", attack, [liar], rounds=1, max_step=2.0, max_share=1.0)
    start = run_start(server)
    parameters = server.reply_checks.model.parameters

    def length(site):
        squared = sum(float((sent[site][k] - start[k].double()).square().sum()) for k in parameters)
        return squared**0.5 / server.sites[site] ** 0.5

    allowed = 2 * sorted(length(site) for site in SITES[1:])[2]  # the upper of the two in the middle
    assert length(liar) > 5 * allowed
    factors = dict.fromkeys(SITES, 1.0) | {liar: allowed / length(liar)}
    total = sum(server.sites.values())
    for key in parameters:
        first = start[key].double()
        moved = sum(server.sites[s] / total * factors[s] * (sent[s][key] - first) for s in SITES)
        torch.testing.assert_close(server.state[key].double(), first + moved, rtol=1e-4, atol=1e-6)
    assert set(server.rounds[0]["steps"]) >= {liar}


def run_start(server):
    """The model that the run began with."""
    from medfedaug.federation import FederationServer

    return FederationServer(server.config).state


# ---------------------------------------------------------------- the cap on a share


def test_the_cap_holds_in_what_methods_exchange_too(attacked, monkeypatch):
    from medfedaug.methods.average import AverageServer

    given, accept = {}, AverageServer.accept
    monkeypatch.setattr(
        AverageServer,
        "accept",
        lambda self, site, payload, weight=1.0: (
            given.__setitem__(site, weight),
            accept(self, site, payload, weight),
        )[1],
    )
    attacked("fedfd", "hijack", SITES[:1], rounds=1, max_share=0.3)
    assert given[SITES[0]] / sum(given.values()) == pytest.approx(0.3)


def test_without_a_cap_and_with_one_that_nobody_reaches_the_bits_are_the_same(phantom_dir, tiny_config):
    sites = ["site_A", "site_B"]
    plain = run_in_process(tiny_config("fedrdn,fedfa"), phantom_dir, sites, "cpu")
    capped = run_in_process(tiny_config("fedrdn,fedfa", max_share=0.9), phantom_dir, sites, "cpu")
    assert all(torch.equal(plain.state[key], value) for key, value in capped.state.items())


@pytest.mark.parametrize("largest", [0.2, 0.25, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("weights", [[5, 5, 5, 5, 5], [1, 2, 3, 4, 2**31], [2**31, 2**31, 1, 1, 1], [7]])
def test_no_share_is_above_the_cap_and_the_smaller_ones_stay_as_they_are(weights, largest):
    given = {str(index): float(weight) for index, weight in enumerate(weights)}
    capped = capped_weights(given, largest)
    total = sum(capped.values())
    assert max(capped.values()) / total <= max(largest, 1 / len(weights)) + 1e-12
    level = max(capped.values())
    assert all(capped[site] == min(weight, level) for site, weight in given.items())
    if max(given.values()) / sum(given.values()) <= largest:
        assert capped == given
    elif largest * len(weights) > 1:
        assert level / total == pytest.approx(largest)


@pytest.mark.parametrize("share", [0, -1, 1.5, "half"])
def test_a_share_that_is_none_is_refused(tiny_config, share):
    with pytest.raises(ConfigError, match="max_share"):
        tiny_config(max_share=share)
