"""DP-FedAvg against McMahan et al. 2018: the noisy mean, what a site can change, and what a run spends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from reference import assert_models
from robust import PLAN, SITES, by_hand
from running import TINY_ARGS
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.federation import FederationServer, Request, Site, SiteTrainer, run_in_process
from medfedaug.hospital.methods import dp_fedavg
from medfedaug.hospital.privacy import epsilon_spent
from medfedaug.methods import build_methods
from medfedaug.methods.base import RoundMean, ServerContext, SiteUpdate

NO_NORM = {"network": "unet", "network_args": {"channels": [4, 8], "strides": [2], "norm": "instance"}}


@pytest.fixture
def known_noise(monkeypatch):
    """Seeds the noise; call it to have the same numbers again."""

    def seeded():
        random = np.random.default_rng(7)
        return lambda shape: torch.from_numpy(random.standard_normal(tuple(shape)))

    monkeypatch.setattr(dp_fedavg, "secret_normal", seeded())
    return seeded


@pytest.mark.parametrize(("clip", "sites"), [(0.01, 0), (0.02, 8), (1e3, 0)])
def test_the_model_is_the_noisy_mean_of_clipped_updates(federate, known_noise, clip, sites):
    z, n, noise, clipped = 0.4, sites or 5, known_noise(), []

    def rule(models, names, weights, network):
        before = {key: value.detach().numpy() for key, value in network.named_parameters()}
        total = {key: np.zeros_like(value) for key, value in before.items()}
        clipped.append([])
        for name, model in zip(names, models, strict=True):
            update = {key: model[key].numpy() - value for key, value in before.items()}
            norm = math.sqrt(sum(float((u**2).sum()) for u in update.values()))
            clipped[-1] += [name] if norm > clip else []
            for key, u in update.items():
                total[key] += u * min(1.0, clip / norm)
        return {
            key: torch.from_numpy(value + total[key] / n) + z * clip / n * noise(value.shape)
            for key, value in before.items()
        }

    settings = {"dp_fedavg": {"clip": clip, "noise_multiplier": z, "sites": sites}}
    run = federate("dp_fedavg", PLAN, SITES, settings)  # one site misses the second round
    assert_models(run, by_hand(run, rule))
    reported = [entry["methods"]["dp_fedavg"] for entry in run.server.rounds]
    assert [one["clipped"] for one in reported] == clipped
    assert all(clipped) == (clip < 1)
    assert {(one["sites"], one["noise"]) for one in reported} == {(n, z * clip / n)}


def server(settings=None, sites=5, features=3, rounds=4):
    (method,) = build_methods([{"name": "dp_fedavg", "args": settings or {}}])
    context = ServerContext(
        nn.Linear(features, 2), 1, weights=lambda: dict.fromkeys(map(str, range(sites)), 1.0), rounds=rounds
    )
    return method.aggregator(context)


def one_round(half, updates, number=1):
    """The step that the model takes, for updates by site."""
    start = {key: torch.zeros_like(value) for key, value in half.context.network.state_dict().items()}
    for site, update in updates.items():
        half.accept(SiteUpdate(site, number, {key: v + update for key, v in start.items()}, {}, 1.0))
    new = half.result(RoundMean(number, start, start, dict.fromkeys(updates, 1.0)))
    return torch.cat([value.flatten() for value in new.values()]).double()


@pytest.mark.parametrize("size", [1e-4, 1.0, -50.0, 1e9])
def test_a_site_moves_the_model_by_no_more_than_its_share_of_the_limit(size):
    settings = {"clip": 0.3, "noise_multiplier": 0.0}
    others = {"0": 0.01, "1": -3.0, "2": 0.02}
    without = one_round(server(settings), others)
    moved = float((one_round(server(settings), {**others, "4": size}) - without).norm())
    assert moved <= 0.3 / 5 * (1 + 1e-5)
    if abs(size) >= 1:
        assert moved == pytest.approx(0.3 / 5, rel=1e-5)


@pytest.fixture
def two_sites(phantom_dir, tiny_config):
    """`two_sites("dp_fedavg", settings)`: a run of two phantom sites, with a network without batch norm."""
    from medfedaug.data.sites import find_sites

    folders = [folder for folder in find_sites(phantom_dir) if folder.cases["training"]]
    return lambda methods, settings=None, **changes: (
        tiny_config(methods, settings=settings, **NO_NORM, **changes),
        folders,
        phantom_dir,
    )


def test_the_noise_has_the_reported_deviation_and_follows_from_no_seed():
    settings = {"clip": 2.0, "noise_multiplier": 1.5, "sites": 10}
    torch.manual_seed(0)
    first = one_round(half := server(settings, features=20_000), {"0": 0.0})
    torch.manual_seed(0)
    second = one_round(server(settings, features=20_000), {"0": 0.0})
    assert half.summary()["noise"] == pytest.approx(0.3)
    assert float(first.std()) == pytest.approx(0.3, rel=0.03)  # 40,000 numbers
    assert abs(float(first.mean())) < 0.3 * 5 / math.sqrt(40_000)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / math.sqrt(40_000)


@pytest.mark.parametrize(("z", "rounds"), [(0.7, 1), (1.0, 4), (5.0, 4), (12.0, 50)])
def test_rounds_spend_the_budget_that_opacus_computes(z, rounds):
    accountant = RDPAccountant()
    half = server({"noise_multiplier": z, "delta": 1e-6}, rounds=rounds)
    for number in range(1, rounds + 1):
        one_round(half, {"0": 0.1}, number)
        accountant.step(noise_multiplier=z, sample_rate=1.0)
    reported = half.summary()
    assert reported["privacy/delta"] == 1e-6
    assert reported["privacy/epsilon"] == pytest.approx(accountant.get_epsilon(delta=1e-6), rel=0.01)
    # The Gaussian mechanism's own curve, α/(2z²) a round, at the best order (Canonne et al., 2020, Prop. 12).
    orders = np.geomspace(1.001, 2000, 100_000)
    curve = rounds * orders / (2 * z**2) + np.log1p(-1 / orders) - np.log(1e-6 * orders) / (orders - 1)
    assert curve.min() - 1e-9 <= reported["privacy/epsilon"] <= curve.min() * 1.02


def test_a_budget_that_the_rounds_exceed_is_refused_before_the_first(two_sites):
    allowed = {"noise_multiplier": 6.0, "max_epsilon": 2.0}
    (method,) = build_methods([{"name": "dp_fedavg", "args": allowed}])
    assert method.spent(3) < 2 < method.spent(8)
    config, folders, data = two_sites("dp_fedavg", {"dp_fedavg": allowed}, rounds=8)
    with pytest.raises(
        ConfigError, match=r"8 rounds with noise_multiplier 6 spend ε = .*max_epsilon is 2"
    ) as e:
        run_in_process(config, data, folders, "cpu")
    enough = float(str(e.value).rsplit(" ", 1)[1])
    build_methods([{"name": "dp_fedavg", "args": {**allowed, "noise_multiplier": enough}}])
    assert epsilon_spent([(enough + 0.01, 8)], 1e-5) <= 2 < epsilon_spent([(enough - 0.05, 8)], 1e-5)


def test_the_account_goes_on_after_a_restart(two_sites, tmp_path):
    settings = {"dp_fedavg": {"noise_multiplier": 3.0, "clip": 0.1, "max_epsilon": 6.0}}
    config, folders, data = two_sites("dp_fedavg", settings, rounds=2)
    first = run_in_process(config, data, folders, "cpu")
    first.save(tmp_path / "server.pt")
    longer, *_ = two_sites("dp_fedavg", settings, rounds=4)
    again = FederationServer(longer)
    again.restore(tmp_path / "server.pt")
    half = again.aggregation.aggregators["dp_fedavg"]
    assert (half.sites, half.rounds) == (2, 2)
    for site in [Site(folder.name, SiteTrainer(longer, data, "cpu")) for folder in folders]:
        site.answer(again.prepare())
        if site.name == folders[0].name:
            request = again.start_round()
            assert isinstance(request, Request)
        assert again.accept(site.name, site.answer(request))
    again.finish_round()
    reported = again.results()["rounds"]
    assert [entry["methods"]["dp_fedavg"]["privacy/epsilon"] for entry in reported] == [
        epsilon_spent([(3.0, rounds)], 1e-5) for rounds in (1, 2, 3)
    ]
    too_long, *_ = two_sites("dp_fedavg", settings, rounds=40)
    with pytest.raises(ConfigError, match="40 rounds with noise_multiplier 3 spend"):
        FederationServer(too_long).restore(tmp_path / "server.pt")


@pytest.mark.parametrize("other", ["fedrdn", "scaffold"])
def test_methods_that_send_values_without_noise_are_refused(two_sites, other):
    config, *_ = two_sites(f"dp_fedavg,{other}")
    with pytest.raises(ConfigError, match=f"{other} provides exchange .*, dp_fedavg excludes it"):
        FederationServer(config)


def test_running_statistics_are_refused_unless_they_stay(tiny_config):
    with pytest.raises(ConfigError, match=r"running statistics.*running_mean.*\"norm\": \"instance\""):
        FederationServer(tiny_config("dp_fedavg", network_args={**TINY_ARGS, "norm": "batch"}))
    for methods in ("dp_fedavg,fedbn", "dp_fedavg,silobn"):
        FederationServer(tiny_config(methods, network_args={**TINY_ARGS, "norm": "batch"}))
    unseen = {"silobn": {"unseen": "average"}}
    with pytest.raises(ConfigError, match="silobn provides exchange"):
        FederationServer(
            tiny_config("dp_fedavg,silobn", settings=unseen, network_args={**TINY_ARGS, "norm": "batch"})
        )
