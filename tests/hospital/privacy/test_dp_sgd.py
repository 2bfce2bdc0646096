"""DP-SGD at a site: what a step is, what one case can change, what it spends, and what it is refused with."""

from functools import partial

import numpy as np
import pytest
import reference
import torch
from private_steps import by_hand, epsilon
from running import TINY_ARGS

from medfedaug.data.sites import find_sites
from medfedaug.errors import PrivacyRefused, RunFailed
from medfedaug.federation import FederationServer, Request, Site, SiteTrainer, run_in_process
from medfedaug.hospital.privacy import PrivacyLedger, PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.methods import parse_methods
from medfedaug.models import networks
from medfedaug.simulate import configure

RATE = 0.5


def private(**changes) -> PrivacyPolicy:
    values = {"sgd_noise_multiplier": 1e-7, "sgd_clip": 0.05, "epsilon": 1e30, "min_images": 1}
    return PrivacyPolicy.from_dict({**values, **changes})


@pytest.fixture
def federation(make_photos, tmp_path, monkeypatch):
    """`federation("fedavg", private(), rounds=1)`: three sites of photographs, of which each is a case."""
    for name, network in reference.NETWORKS.items():
        monkeypatch.setitem(networks._NETWORKS, name, network)
    for name in "ABC":
        if not (tmp_path / "photos" / name).exists():
            make_photos(name, 5, size=8)

    def make(methods="fedavg", **changes):
        # One step of all six training cases, unless a test says otherwise.
        values = {"network": "reference_linear", "rounds": 1, "batch_size": 6, "learning_rate": RATE}
        chosen = tuple(parse_methods(methods))
        return configure(find_sites(tmp_path / "photos"), methods=chosen, **{**values, **changes})

    def run(methods="fedavg", policy=None, **changes):
        config = make(methods, **changes)
        return run_in_process(
            config, tmp_path / "photos", list("ABC"), "cpu", privacy=partial(SitePrivacy, policy or private())
        )

    run.config, run.root = make, tmp_path / "photos"
    return run


def updates(federation, policy, site="A", **changes):
    """The model before and after the round of one site."""
    config = federation.config(**changes)
    server = FederationServer(config)
    one = Site(site, SiteTrainer(config, federation.root, "cpu", privacy=SitePrivacy(policy)))
    prepared = one.answer(server.prepare())
    assert not prepared.error, prepared.error
    start = {key: value.clone() for key, value in server.state.items()}
    request = Request("train", 1, weights=start, run=server.run)
    reply = one.answer(request)
    assert not reply.error, reply.error
    return start, reply


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_a_step_is_the_mean_of_clipped_gradients_of_single_cases(federation, clip):
    start, reply = updates(
        federation, private(sgd_clip=clip, sgd_noise_multiplier=1e-9 / clip), optimizer="sgd"
    )
    expected = by_hand(federation.root / "A", start, clip)
    for key, value in reply.weights.items():
        torch.testing.assert_close(
            value.double(), start[key].double() - RATE * expected[key], rtol=0, atol=1e-6
        )


def test_the_noise_is_as_large_as_it_says_and_never_the_same(federation):
    sigma, clip = 3.0, 0.05
    noisy = private(sgd_noise_multiplier=sigma, sgd_clip=clip)
    noises = []
    for _ in range(6):
        start, reply = updates(federation, noisy, optimizer="sgd")
        step = by_hand(federation.root / "A", start, clip)
        left = [(start[k] - reply.weights[k]).double() / RATE - step[k] for k in reply.weights]
        noises.append(torch.cat([part.flatten() for part in left]))
    noise = torch.stack(noises)
    expected, count = sigma * clip / 6, noise.numel()  # six cases
    assert abs(float(noise.std()) / expected - 1) < 6 / (2 * count) ** 0.5
    assert abs(float(noise.mean())) < 6 * expected / count**0.5
    correlation = torch.corrcoef(noise)
    assert float((correlation - torch.eye(6)).abs().max()) < 6 / noise.shape[1] ** 0.5


def test_what_is_drawn_is_one_sample_of_each_of_some_cases(phantom_dir, tiny_config):
    """A volume has many slices: one of them at most is in a step, and no step has the same cases."""
    config = tiny_config(batch_size=2, network_args={**TINY_ARGS, "norm": "instance"}, local_epochs=20)
    trainer = SiteTrainer(config, phantom_dir / "site_A", "cpu", privacy=SitePrivacy(private()))
    trainer.open("site_A")
    loader = trainer.training.batches(trainer.samples, trainer.own_dataset(0), 0)
    ranges = trainer.samples.training().ranges()
    assert len(ranges) == 3
    assert min(map(len, ranges)) > 1
    drawn: list[list[int]] = []
    real = loader.dataset.samples.draw

    def watched(index, random):
        drawn[-1].append(index)
        return real(index, random)

    loader.dataset.samples.draw = watched
    sizes = []
    for _ in range(400):
        drawn.append([])
        sizes.append(len(loader.draw()))
        assert drawn[-1] == []  # read one after the other, when they are needed
    assert set(sizes) == {0, 1, 2, 3}
    assert abs(np.mean(sizes) - 2) < 6 * (3 * 2 / 9 / 400) ** 0.5 * 3**0.5
    drawn.clear()
    for _ in range(40):
        drawn.append([])
        assert all(len(case()["image"]) == 1 for case in loader.draw())
        of = [next(i for i, one in enumerate(ranges) if index in one) for index in drawn[-1]]
        assert len(set(of)) == len(of)
    assert len({index for one in drawn for index in one}) > 3


def test_volumes_train_with_a_step_of_nobody_too(phantom_dir, tiny_config):
    config = tiny_config(batch_size=1, network_args={**TINY_ARGS, "norm": "instance"}, rounds=1)
    server = run_in_process(
        config, phantom_dir, ["site_A", "site_B"], "cpu", privacy=partial(SitePrivacy, private())
    )
    for metrics in server.rounds[0]["sites"].values():
        assert "train_loss" not in metrics
        assert metrics["privacy/weights"] == 1.0
        assert metrics["privacy/epsilon"] > 0
    assert all(bool(torch.isfinite(value).all()) for value in server.state.values())


# ---------------------------------------------------------------- the account


def test_steps_and_statistics_are_in_one_account_over_rounds_and_jobs(federation, tmp_path):
    bounds = {"intensity_mean": [0, 1], "intensity_std": [0.01, 1]}
    policy = private(sgd_noise_multiplier=2.0, noise_multiplier=4.0, clip=bounds)
    config = federation.config("fedrdn", batch_size=3, rounds=2)
    ledger, found = tmp_path / "ledger.sqlite", []
    for _ in range(2):
        server = run_in_process(
            config, federation.root, list("ABC"), "cpu", privacy=partial(SitePrivacy, policy)
        )
        found.append(server.rounds[-1]["sites"]["A"]["privacy/epsilon"])
    # Two rounds of two steps of three of six cases, and one release of FedRDN.
    assert found[0] == pytest.approx(epsilon((2.0, 0.5, 4), (4.0, 1.0, 1)))
    kept = SiteTrainer(config, federation.root, "cpu", privacy=SitePrivacy(policy, ledger))
    kept.open("A")
    for _ in range(3):
        kept.guard.train(2, 0.5)
    assert kept.guard.metrics()["privacy/epsilon"] == pytest.approx(epsilon((2.0, 0.5, 6)))
    assert PrivacyLedger(ledger).releases() == [(2.0, 6, 0.5)]


def test_several_cases_of_a_patient_cost_more(federation):
    config = federation.config()
    trainer = SiteTrainer(
        config,
        federation.root,
        "cpu",
        privacy=SitePrivacy(private(cases_per_patient=2, sgd_noise_multiplier=3.0)),
    )
    trainer.open("A")
    trainer.guard.train(5, 0.25)
    expected = epsilon((1.5, 1 - 0.75**2, 5))
    assert trainer.guard.metrics()["privacy/epsilon"] == pytest.approx(expected)
    trainer.guard.per_patient = (3,)
    with pytest.raises(PrivacyRefused, match="a patient has 3 training cases, and noise would hide 2"):
        trainer.guard.train(5, 0.25)


def test_a_round_that_the_budget_does_not_allow_is_not_trained(federation):
    one = epsilon((1.0, 1.0, 1))
    with pytest.raises(RunFailed, match="site A: privacy budget spent: training would exceed ε"):
        federation(policy=private(sgd_noise_multiplier=1.0, epsilon=1.5 * one), rounds=10)


def test_exact_statistics_normalise_nothing_where_the_server_leaves_out_the_exchange(federation):
    bounds = {"intensity_mean": [0, 1], "intensity_std": [0.01, 1]}
    policy = private(sgd_noise_multiplier=1.0, noise_multiplier=1.0, score_noise_multiplier=1.0, clip=bounds)
    config = federation.config("fedrdn")
    site = Site("A", SiteTrainer(config, federation.root, "cpu", privacy=SitePrivacy(policy)))
    server = FederationServer(config)
    for task, round_ in (("test", 0), ("train", 1)):
        request = Request(task, round_, weights=dict(server.state), run=server.run)
        assert "needs the statistics of its images" in site.answer(request).error


# ---------------------------------------------------------------- what it does not go with


@pytest.mark.parametrize(
    ("methods", "changes", "words"),
    [
        (
            "fedavg",
            {"network": "reference_convolutional"},
            "the network has batch norm .*take instance or group",
        ),
        ("fedprox", {}, "nothing bounds what one case changes in the local training of fedprox"),
        ("norm", {}, "norm normalises with statistics of all the site's images, which one case changes"),
        ("fedrdn", {}, "its statistics would leave without noise beside weights with noise"),
        ("fedavg", {"precision": "bfloat16"}, "precision is bfloat16, and float32 is needed"),
    ],
)
def test_what_would_let_a_case_change_more_is_refused_with_the_reason(federation, methods, changes, words):
    with pytest.raises(RunFailed, match=f"site A: .*{words}"):
        federation(methods, **changes)


def test_it_goes_under_masks_too(federation):
    """The server learns the sum of updates with noise."""
    server = federation(policy=private(sgd_noise_multiplier=1.0), secure_aggregation=True)
    assert server.rounds[0]["methods"]["masks"]["summed"] == list("ABC")
    assert server.rounds[0]["sites"]["A"]["privacy/weights"] == 1.0
