"""A site that is killed in the middle of a round goes on from there, to the same bits as without the kill."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from medfedaug.config.machine import Machine
from medfedaug.config.run import RunConfig
from medfedaug.errors import MedFedAugWarning
from medfedaug.federation import FederationServer, Site, SiteTrainer
from medfedaug.federation.messages.checkpoint import load_checkpoint, save_checkpoint
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.protocol import Carrier, run
from medfedaug.privacy import PrivacyPolicy

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


class Killed(BaseException):
    """As by the system: nothing of the process catches it."""


class Machines(Carrier):
    """Sites of which one loses its process before a step of a round, and is asked again in a new one.

    Args:
        config: the run.
        data: the folder of the sites.
        state: the folder in which they keep what survives.
        kill: site, round and the number of steps after which it dies; ``None`` for nobody.
        save_every: see `SiteTrainer`, of the site that dies.
        policies: by site.
        ahead: batches that are made ahead.
        device: of the sites.
    """

    def __init__(
        self,
        config: RunConfig,
        data: Path,
        state: Path,
        kill: tuple[str, int, int] | None = None,
        save_every: float = 1e-9,
        policies: Mapping[str, PrivacyPolicy] | None = None,
        ahead: int = 0,
        device: str = "cpu",
    ) -> None:
        self.config, self.data, self.state, self.kill = config, data, state, kill
        self.save_every, self.policies, self.ahead = save_every, policies or {}, ahead
        self.device = device
        self.sites = {path.name: self.start(path.name) for path in sorted(data.iterdir())}
        self.events: list[dict] = []
        self.steps = self.kills = 0

    def start(self, name: str) -> Site:
        trainer = SiteTrainer(
            self.config,
            self.data,
            self.device,
            state_dir=self.state / name,
            policy=self.policies.get(name),
            ledger=self.state / name / "ledger.json",
            machine=Machine(1.0, ahead=self.ahead),
            save_every=self.save_every if self.kill is None or name == self.kill[0] else 0.0,
        )
        return Site(name, trainer, on_event=lambda event: self.events.append({**event, "site": name}))

    def connected(self) -> list[str]:
        return list(self.sites)

    def ask(self, request, sites: Sequence[str], needed: int, accept) -> Mapping[str, str]:
        for name in sites:
            dies = self.kill is not None and (name, request.round) == self.kill[:2] and request.task == TRAIN

            def count(name=name, dies=dies) -> bool:
                if dies and not self.kills and self.steps == self.kill[2]:
                    raise Killed
                self.steps += dies
                return False

            self.steps = 0
            try:
                reply = self.sites[name].answer(request, count)
            except Killed:
                self.kills += 1
                for generator in (torch.manual_seed, np.random.seed, random.seed):  # of another process
                    generator(987)
                self.steps = 0
                self.sites[name] = self.start(name)
                reply = self.sites[name].answer(request, count)
            assert not reply.error, reply.error
            # Before the answer leaves: what goes on from the file a second time would repeat its noise.
            assert not list((self.state / name).rglob("*.half.pt"))
            accept(name, reply)
        return {}

    def round_done(self, server: FederationServer) -> None:
        pass


def trained(machines: Machines) -> FederationServer:
    server = FederationServer(machines.config)
    run(server, machines)
    return server


def assert_same(one: FederationServer, other: FederationServer) -> None:
    assert one.state.keys() == other.state.keys()
    for key in one.state:
        assert torch.equal(one.state[key], other.state[key]), key
    assert one.payload.keys() == other.payload.keys()
    for key in one.payload:
        assert torch.equal(one.payload[key], other.payload[key]), key

    def losses(server):
        return [
            {site: {k: v for k, v in n.items() if k != "seconds"} for site, n in entry["sites"].items()}
            for entry in server.rounds
        ]

    assert losses(one) == losses(other)


def check(
    config: RunConfig, data: Path, tmp_path: Path, kill=("B", 2, 1), device: str = "cpu", **options
) -> None:
    whole = Machines(config, data, tmp_path / "whole", save_every=0.0, device=device)
    options["device"] = device
    broken = Machines(config, data, tmp_path / "broken", kill, **options)
    assert_same(trained(broken), trained(whole))
    assert broken.kills == 1
    # It went on: the second process took the steps that were left.
    (event,) = [e for e in broken.events if e["event"] == "answered" and e.get("continued")]
    assert (event["site"], event["round"], event["continued"]) == kill
    assert not list((tmp_path / "broken").rglob("*.half.pt")), "of a round that is over nothing is kept"


BOUNDS = {"feature_mean": [-5.0, 5.0], "feature_std": [0.0, 5.0]}
FAST = ("fedrdn,fedfa+,fedbn", "scaffold", "fedfd_a,silobn", "fraug")
SEGMENTATION = ["fedavg", "fedrdn,fedfa+,fedbn", "scaffold", "fedfd_a,silobn", "ditto", "fedprox,mixup,norm"]
SEGMENTATION += [
    "fedsam,feddyn",
    "feddg",
    "fedharmo,randconv",
    "moex",
    "gperxan",
    "dac_sc",
    "partialfed_adaptive",
]
CLASSIFICATION = ["fraug", "fedfd_a", "fedsr", "moon", "fpl", "fedmix", "fedrod", "fedproto", "fedrobust"]


def marked(names: list[str]) -> list:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def segmentation(make_site, tmp_path, tiny_config):
    """Two sites and a run of two epochs of two steps: `segmentation("fedavg", rounds=3)`."""
    for name in "AB":
        make_site(name, shape=(16, 16, 2), cases=(4, 1, 1))

    def make(methods: str = "fedavg", **changes) -> RunConfig:
        norm = {"norm": "batch"} if any(n in methods for n in ("fd_a", "bn", "gperxan")) else {}
        network = {**tiny_config().network_args, **norm, **changes.pop("network_args", {})}
        values = {"rounds": 3, "local_epochs": 2, "batch_size": 2, **changes}
        return tiny_config(methods, network_args=network, **values)

    return make


@pytest.mark.parametrize("methods", marked(SEGMENTATION))
def test_a_half_trained_round_goes_on_to_the_bit(segmentation, tmp_path, methods):
    check(segmentation(methods), tmp_path / "data", tmp_path)


@pytest.mark.parametrize("methods", marked(CLASSIFICATION))
def test_a_half_trained_round_of_a_classifier_goes_on_to_the_bit(photo_config, tmp_path, methods):
    network = {} if "fd_a" not in methods else {"network": "resnet18"}
    config = photo_config(methods, rounds=3, local_epochs=2, batch_size=3, **network)
    check(config, tmp_path / "photos", tmp_path, kill=("B", 3, 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bfloat16"},
        {"local_steps": 9},
        {"optimizer": "sgd", "learning_rate": 0.01},
        {"augmentation": "full"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_precision_steps_optimisers_and_drawn_images_go_on_too(segmentation, tmp_path, changes):
    check(segmentation("fedrdn", **changes), tmp_path / "data", tmp_path, kill=("B", 2, 3))


def test_batches_that_were_made_ahead_are_not_lost(segmentation, tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)  # a thread of its own makes them
    check(segmentation("fedrdn", augmentation="full"), tmp_path / "data", tmp_path, ahead=2)


def test_without_saving_the_round_is_trained_again_to_the_same_bits(segmentation, tmp_path):
    config = segmentation("fedrdn,fedbn")
    whole = Machines(config, tmp_path / "data", tmp_path / "whole", save_every=0.0)
    broken = Machines(config, tmp_path / "data", tmp_path / "broken", ("B", 2, 3), save_every=0.0)
    assert_same(trained(broken), trained(whole))
    assert broken.kills == 1
    assert not any(event.get("continued") for event in broken.events)


@pytest.fixture
def interrupted(segmentation, tmp_path):
    """A site that was killed in round 1, what it was asked, and how to start it again."""
    config = segmentation("fedavg")
    machines = Machines(config, tmp_path / "data", tmp_path / "state")
    server = FederationServer(config)
    for name, site in machines.sites.items():
        server.accept_preparation(name, site.answer(server.prepare()))
    server.finish_preparation()
    request, steps = server.start_round(), iter(range(100))

    def dies() -> bool:
        if next(steps) == 3:
            raise Killed
        return False

    with pytest.raises(Killed):
        machines.sites["B"].answer(request, dies)
    (kept,) = (tmp_path / "state").rglob("*.half.pt")
    return machines, request, kept


def continued(machines: Machines) -> int:
    return machines.events[-1].get("continued", 0)


def test_what_is_kept_is_the_sites_own(interrupted):
    assert interrupted[2].stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("differs", ["weights", "version"])
def test_half_a_round_is_of_no_use_for_another_request(interrupted, monkeypatch, differs):
    machines, request, kept = interrupted
    other = request
    if differs == "weights":
        other = replace(request, weights={key: value + 0.1 for key, value in request.weights.items()})
    else:
        monkeypatch.setattr("medfedaug.federation.site.trainer.__version__", "another")
    expected = Machines(machines.config, machines.data, machines.state.with_name("other")).sites["B"]
    assert expected.answer(replace(request, task="prepare")).error == ""
    site = machines.start("B")
    reply, whole = site.answer(other), expected.answer(other)
    assert continued(machines) == 0
    assert all(torch.equal(reply.weights[key], whole.weights[key]) for key in whole.weights)
    assert not kept.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn"])
def test_a_torn_file_costs_the_steps_and_nothing_else(interrupted, content):
    machines, request, kept = interrupted
    kept.write_bytes(content)
    with pytest.warns(MedFedAugWarning, match="trained from its beginning"):
        assert machines.start("B").answer(request).error == ""
    assert continued(machines) == 0


def test_a_state_of_other_objects_is_refused_whole(interrupted):
    machines, request, kept = interrupted
    content = load_checkpoint(kept)
    name = next(
        n for n, (kind, *_) in content["state"].items() if kind == "tensor" and n.startswith("network")
    )
    content["state"][name] = ("tensor", torch.zeros(7), True)
    save_checkpoint(kept, content)
    with pytest.warns(MedFedAugWarning, match="trained from its beginning"):
        reply = machines.start("B").answer(request)
    assert (reply.error, continued(machines)) == ("", 0)
    whole = Machines(machines.config, machines.data, machines.state.with_name("other"))
    expected = whole.sites["B"].answer(request)
    assert all(torch.equal(reply.weights[key], expected.weights[key]) for key in expected.weights)


def test_a_full_disk_ends_no_training(segmentation, tmp_path, full_disk):
    config = segmentation("fedavg")
    machines = Machines(config, tmp_path / "data", tmp_path / "state")
    server = FederationServer(config)
    for trainer in (site.trainer for site in machines.sites.values()):
        trainer.saves_each_round = False
    for name, site in machines.sites.items():
        server.accept_preparation(name, site.answer(server.prepare()))
    server.finish_preparation()
    with pytest.warns(MedFedAugWarning, match="a restart repeats the round"):
        assert machines.sites["B"].answer(server.start_round()).error == ""


def entered(machines: Machines) -> int:
    """The releases with noise of site B: under DP-SGD its steps."""
    (spent,) = machines.sites["B"].trainer.ledger.releases()
    return spent.releases


@pytest.mark.parametrize(
    ("methods", "noise"),
    [("fedavg", {"sgd_noise_multiplier": 2.0}), ("fedfa", {"noise_multiplier": 4.0, "clip": BOUNDS})],
)
def test_a_round_under_dp_sgd_or_with_noisy_statistics_is_entered_once(
    segmentation, tmp_path, methods, noise
):
    pytest.importorskip("opacus")
    config = segmentation(methods, network_args={"norm": ["group", {"num_groups": 2}]})
    policy = PrivacyPolicy(min_images=1, max_epsilon=1e6, delta=0.1, **noise)
    policies = {"A": policy, "B": policy}
    whole = Machines(config, tmp_path / "data", tmp_path / "whole", save_every=0.0, policies=policies)
    broken = Machines(config, tmp_path / "data", tmp_path / "broken", ("B", 2, 3), policies=policies)
    first, second = trained(whole), trained(broken)
    assert [e["continued"] for e in broken.events if e.get("continued")] == [3]
    assert entered(broken) == entered(whole)
    assert entered(whole) % config.rounds == 0
    # Its noise is of no seed, and never the same again.
    assert (
        any(not torch.equal(first.state[key], second.state[key]) for key in first.state) or methods == "fedfa"
    )


def test_a_round_under_dp_sgd_that_was_not_saved_is_entered_again(segmentation, tmp_path):
    pytest.importorskip("opacus")
    config = segmentation("fedavg", network_args={"norm": ["group", {"num_groups": 2}]})
    policy = PrivacyPolicy(min_images=1, max_epsilon=1e6, delta=0.1, sgd_noise_multiplier=2.0)
    policies, kill = {"A": policy, "B": policy}, ("B", 2, 3)
    machines = Machines(config, tmp_path / "data", tmp_path, kill, save_every=0.0, policies=policies)
    trained(machines)
    steps = config.local_epochs * 4 // config.batch_size  # of its four cases
    assert entered(machines) == (config.rounds + 1) * steps
