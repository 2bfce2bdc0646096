"""A site that is killed in the middle of a round repeats the round, and pays for both under noise."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from medfedaug.config.run import RunConfig
from medfedaug.federation import FederationServer, Site, SiteTrainer
from medfedaug.federation.in_process import SitesInProcess
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.protocol import run
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy

KILLED, ROUND, STEPS = "B", 2, 3
"""The site whose process ends, its round, and the steps that it took in it."""

BOUNDS = {"feature_mean": [-5.0, 5.0], "feature_std": [0.0, 5.0]}


class Killed(BaseException):
    """As by the system: nothing of the process catches it."""


def trained(config, data: Path, state: Path, policy=None, *, dies: bool):
    """A run after its end, and its sites, of which one may lose its process before a step and begins anew."""

    def start(name: str) -> Site:
        privacy = SitePrivacy(policy or PrivacyPolicy.of_simulation(), state / name / "ledger.sqlite")
        return Site(name, SiteTrainer(config, data, "cpu", state_dir=state / name, privacy=privacy))

    class Machines(SitesInProcess):
        def ask(self, request, sites, needed, accept):
            if dies and (request.round, request.task) == (ROUND, TRAIN):
                steps = iter(range(100))

                def stop() -> bool:
                    if next(steps) == STEPS:
                        raise Killed
                    return False

                with pytest.raises(Killed):
                    self.sites[KILLED].answer(request, stop)
                for seed in (torch.manual_seed, np.random.seed, random.seed):  # of another process
                    seed(987)
                self.sites[KILLED] = start(KILLED)
            return super().ask(request, sites, needed, accept)

    machines, server = Machines({name: start(name) for name in "AB"}), FederationServer(config)
    run(server, machines)
    return server, machines.sites


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
    whole, broken = (
        trained(config, tmp_path / "data", tmp_path / str(dies), dies=dies)[0] for dies in (False, True)
    )
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
    _, sites = trained(config, tmp_path / "data", tmp_path / "state", policy, dies=True)
    releases = {}
    for name, site in sites.items():
        (spent,) = site.trainer.privacy.ledger.releases()
        releases[name] = spent.releases
    assert releases == {"A": 3 * each_round, KILLED: 4 * each_round}
