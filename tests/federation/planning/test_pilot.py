"""A job that trains a pilot after the exchange of fingerprints, through the kits of hospitals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hospitals import Deployment, Hospital
from running import TINY_NETWORK

from medfedaug.config.run import RunConfig
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.errors import ConfigError
from medfedaug.federation.in_process import run_in_process
from medfedaug.federation.job_summary import summary
from medfedaug.federation.messages.messages import PREPARE, PROSPECT, TRAIN, Request
from medfedaug.methods import parse_methods
from medfedaug.metrics.convergence import is_converged
from medfedaug.privacy.job_log import JobBook, job_hash

FREE = {"approve": False, "min_cases": 1}


SITES = ("site_A", "site_B")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pilot") / "data"
    make_phantom(folder, sites=2, patients=6, shape=(16, 16, 2))
    return folder


@pytest.fixture(scope="module")
def config():
    given = {
        "prospect": True,
        "pilot": ("fedavg", "single"),
        "classes": ("background", "lesion"),
        "rounds": 3,
    }
    return RunConfig.from_dict({**TINY_NETWORK, **given, "batch_size": 4})


@pytest.fixture
def hospitals(data, tmp_path):
    return hospitals_of(data, tmp_path)


def hospitals_of(data, folder):
    rules = {"privacy": {"min_images": 3, "scores": "cases"}, "jobs": FREE}
    return [Hospital(folder / "kits" / name, data / name, **rules) for name in SITES]


@pytest.fixture(scope="module")
def finished(data, config, tmp_path_factory):
    """A job, from its submission to its end: the deployment and the server."""
    deployment = Deployment(hospitals_of(data, tmp_path_factory.mktemp("finished")))
    return deployment, deployment.run(config)


def training(config, methods, rounds):
    """The run that a user would submit alone."""
    return replace(config, prospect=False, pilot=(), methods=parse_methods(methods), rounds=rounds)


def test_each_training_is_the_run_that_it_would_be_alone(data, config, finished):
    _, server = finished
    assert {*server.prospecting.sites} == {*SITES}
    assert list(server.pilot) == ["fedavg", "single"]
    rounds = server.pilot["fedavg"]["config"]["rounds"]
    for methods, results in server.pilot.items():
        alone = run_in_process(training(config, methods, rounds), data, SITES, "cpu").results()
        assert results["config"] == alone["config"]
        for site in SITES:
            ours, theirs = (one["test"]["sites"][site]["cases"].values() for one in (results, alone))
            assert list(ours) == pytest.approx(list(theirs), abs=1e-6)


def test_more_rounds_follow_while_the_first_method_improves(finished):
    deployment, server = finished
    validation = [entry["val_dice"] for entry in server.pilot["fedavg"]["rounds"]]
    attempts = {3: [3], 6: [3, 6], 12: [3, 6, 12]}[len(validation)]
    assert is_converged(validation) or len(attempts) == 3
    asked = [reply.round for name, reply in deployment.replies if name == "site_A" and reply.task == TRAIN]
    assert asked == [round_ for most in (*attempts, len(validation)) for round_ in range(1, most + 1)]


def test_every_training_is_a_configuration_of_the_sites_book(config, finished):
    deployment, server = finished
    book = JobBook(deployment.hospitals["site_A"].kit / "medfedaug/site_A/jobs")
    known = {entry.hash for entry in book.entries()}
    assert {
        job_hash(run) for run in (config.to_dict(), *(one["config"] for one in server.pilot.values()))
    } <= known


def test_a_site_refuses_what_the_job_did_not_announce(config, hospitals):
    site = hospitals[0]
    site.start(config, "job-1")
    for settings, words in (
        ({"methods": "fedbn", "rounds": 3}, "is of fedavg, single"),
        ({"methods": "fedavg", "rounds": 13}, "has 3, 6, 12 rounds"),
        ({"methods": "fedavg", "rounds": True}, "has 3, 6, 12 rounds"),
        ({"methods": "fedavg", "rounds": 3, "learning_rate": 9.0}, "is of fedavg, single"),
        ({"methods": ["fedavg"], "rounds": 3}, "is of fedavg, single"),
        ({}, "exchanges fingerprints alone"),
    ):
        assert words in site.answer(Request(PREPARE, run="a" * 32, planned=settings)).error
    begun = {"methods": "fedavg", "rounds": 3}
    assert not site.answer(Request(PREPARE, run="a" * 32, planned=begun)).error
    assert "exchanges none" in site.answer(Request(PROSPECT, run="a" * 32)).error


def test_what_a_pilot_cannot_be_is_said(config):
    for changes in ({"prospect": False}, {"secure_aggregation": True}, {"planning": {"memory": 1.0}}):
        with pytest.raises(ConfigError, match="a pilot follows an exchange of fingerprints"):
            replace(config, **changes)


def test_the_page_of_the_approval_says_that_more_is_to_be_approved(config, tmp_path):
    text = "\n".join(summary(JobBook(tmp_path / "book").note(config, "job-1", None)))
    assert "IN THIS CONFIGURATION NOTHING IS TRAINED" in text
    assert "fedavg, then single" in text
    assert "3 to 12 rounds" in text
    assert "a configuration of its own" in text
