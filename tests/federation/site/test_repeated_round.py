"""A site that is killed in the middle of a round repeats the round, and pays for both under noise."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from medfedaug.config.run import RunConfig
from medfedaug.federation import FederationServer, Site, SiteTrainer
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.protocol import Carrier, run
from medfedaug.hospital.privacy import PrivacyPolicy

KILLED, ROUND, STEPS = "B", 2, 3
"""The site whose process ends, its round, and the steps that it took in it."""

BOUNDS = {"feature_mean": [-5.0, 5.0], "feature_std": [0.0, 5.0]}


class Killed(BaseException):
    """As by the system: nothing of the process catches it."""


class Machines(Carrier):
    """Sites of which one may lose its process in a round, and is asked again in a new one."""

    def __init__(
        self, config: RunConfig, data: Path, state: Path, policy: PrivacyPolicy | None = None
    ) -> None:
        self.config, self.data, self.state, self.policy = config, data, state, policy
        self.sites = {path.name: self.start(path.name) for path in sorted(data.iterdir())}

    def start(self, name: str) -> Site:
        trainer = SiteTrainer(
            self.config,
            self.data,
            "cpu",
            state_dir=self.state / name,
            policy=self.policy,
            ledger=self.state / name / "ledger.sqlite",
        )
        return Site(name, trainer)

    def connected(self) -> list[str]:
        return list(self.sites)

    def ask(self, request, sites: Sequence[str], needed: int, accept) -> Mapping[str, str]:
        for name in sites:
            reply = self.answer(name, request)
            assert not reply.error, reply.error
            accept(name, reply)
        return {}

    def answer(self, name, request):
        return self.sites[name].answer(request)

    def round_done(self, server: FederationServer) -> None:
        pass


class Interrupted(Machines):
    """One process ends before a step."""

    def answer(self, name, request):
        if (name, request.round, request.task) != (KILLED, ROUND, TRAIN):
            return super().answer(name, request)
        steps = iter(range(100))

        def dies() -> bool:
            if next(steps) == STEPS:
                raise Killed
            return False

        with pytest.raises(Killed):
            self.sites[name].answer(request, dies)
        for seed in (torch.manual_seed, np.random.seed, random.seed):  # of another process
            seed(987)
        self.sites[name] = self.start(name)
        return super().answer(name, request)


def trained(machines: Machines) -> FederationServer:
    server = FederationServer(machines.config)
    run(server, machines)
    return server


@pytest.fixture
def make_config(make_site, tmp_path, tiny_config):
    """Two sites and a run of two epochs of two steps."""
    for name in "AB":
        make_site(name, shape=(16, 16, 2), cases=(4, 1, 1))

    def make(methods: str, norm) -> RunConfig:
        network = {**tiny_config().network_args, "norm": norm}
        return tiny_config(methods, network_args=network, rounds=3, local_epochs=2, batch_size=2)

    return make


@pytest.mark.parametrize("methods", ["fedrdn,fedfa+,fedbn", "fedfd_a,silobn"])
def test_the_model_is_that_of_a_run_without_the_interruption(make_config, tmp_path, methods):
    config = make_config(methods, "batch")
    whole = trained(Machines(config, tmp_path / "data", tmp_path / "whole"))
    broken = trained(Interrupted(config, tmp_path / "data", tmp_path / "broken"))
    assert all(torch.equal(broken.state[key], value) for key, value in whole.state.items())
    assert all(torch.equal(broken.payload[key], value) for key, value in whole.payload.items())
    for one, other in zip(whole.rounds, broken.rounds, strict=True):
        assert {site: entry["train_loss"] for site, entry in one["sites"].items()} == {
            site: entry["train_loss"] for site, entry in other["sites"].items()
        }


@pytest.mark.parametrize(
    ("methods", "noise", "each_round"),
    [
        ("fedavg", {"sgd_noise_multiplier": 2.0}, 4),  # two epochs of two steps
        ("fedfa", {"noise_multiplier": 4.0, "clip": BOUNDS}, 1),
    ],
)
def test_the_interrupted_attempt_stays_in_the_account(make_config, tmp_path, methods, noise, each_round):
    pytest.importorskip("opacus")
    config = make_config(methods, ["group", {"num_groups": 2}])
    policy = PrivacyPolicy(min_images=1, epsilon=1e6, delta=0.1, **noise)
    machines = Interrupted(config, tmp_path / "data", tmp_path / "state", policy)
    trained(machines)
    releases = {}
    for name, site in machines.sites.items():
        (spent,) = site.trainer.ledger.releases()
        releases[name] = spent.releases
    assert releases == {"A": 3 * each_round, KILLED: 4 * each_round}
