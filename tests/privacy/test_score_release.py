"""Scores as an oracle: a site's budget, its rounding and its noise, against models made by hand."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sqlite3
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from hospitals import Deployment
from hospitals import Hospital as KitHospital

from medfedaug.data.quality.content_hash import case_identities
from medfedaug.data.sites import open_site
from medfedaug.errors import ConfigError, MedFedAugError, RunFailed
from medfedaug.federation import FederationServer
from medfedaug.federation.messages.initial_weights import InitialWeights
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.server.evaluation import FEDERATION, EvaluatedRun, Evaluation
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.nvflare_jobs.job.evaluation import EvaluationExecutor
from medfedaug.privacy import LEDGER_FILE, PrivacyLedger, PrivacyPolicy, epsilon_spent, released_scores
from medfedaug.privacy.score_release import dithered, largest_loss, released_loss, step_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
oracle = importlib.import_module("score_oracle")

DAY = 24 * 3600.0


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    """A site of 50 patients, of whom 10 are for validation and 10 for the test."""
    folder = tmp_path_factory.mktemp("oracle")
    oracle.Hospital(folder, 50)
    return folder / "data"


@pytest.fixture
def hospital(phantom, tmp_path):
    """A new site with these images, and the policy of a new kit but for the given settings."""

    def make(**privacy) -> oracle.Hospital:
        if not (tmp_path / "data").exists():
            shutil.copytree(phantom, tmp_path / "data")  # which then belong to the site's ledger
        return oracle.Hospital(tmp_path, 50, PrivacyPolicy(**privacy))

    return make


def entries(hospital, kind="scores"):
    ledger = PrivacyLedger(hospital.folder / LEDGER_FILE)
    return [entry.release for entry in ledger.entries() if entry.release.kind == kind]


def whole(low=-1.0, high=2.0):
    return oracle.Query(low, high, oracle.cells(*oracle.EVERYWHERE))


# ---------------------------------------------------------------- the budget


def test_a_server_gets_the_score_of_one_model_for_each_round_and_the_same_answer_again(hospital):
    site, config = hospital(), oracle.run_config(rounds=3)
    gate = oracle.Gate(config)
    running = site.start(config)
    first = running.answer(gate.ask(whole(), 1)).metrics["dice"]
    assert first is not None
    other = running.answer(gate.ask(whole(), 1, variant=1))
    assert "the scores of another model of round 1 have left in this job, and it gets one" in other.error
    assert not other.metrics
    # The process of the job ends and comes back; another job comes with the same model.
    for again in (site.start(config), site.start(config, "job-2")):
        assert {again.answer(gate.ask(whole(), 1)).metrics["dice"] for _ in range(5)} == {first}
    # The last place of another identity of the run, or of a round that is none, is no way around.
    request = gate.ask(whole(), 1, variant=1)
    assert "another model of round 1" in running.answer(replace(request, run="0" * 32)).error
    assert "round 4" in running.answer(replace(request, round=4)).error
    assert "round 0 is not to be scored" in running.answer(replace(request, round=0)).error
    assert sum(release.queries for release in entries(site)) == 1
    assert running.answer(replace(request, task="test")).metrics["dice"] is not None
    again = replace(gate.ask(whole(), 1, variant=2), task="test")
    assert "another model in the test have left" in running.answer(again).error


def test_a_model_beyond_the_budget_is_not_run_over_the_images(hospital, monkeypatch):
    """The time until the refusal, or an error in its place, would be an answer that nobody counts."""
    site, config = hospital(), oracle.run_config(rounds=1)
    gate, scored, original = oracle.Gate(config), [], SiteTrainer.evaluate_round
    monkeypatch.setattr(
        SiteTrainer, "evaluate_round", lambda self, *args: scored.append(args) or original(self, *args)
    )
    running = site.start(config)
    for task in ("validate", "test"):
        replies = [running.answer(replace(gate.ask(whole(), 1, variant=n), task=task)) for n in range(4)]
        assert [bool(reply.error) for reply in replies] == [False, True, True, True]
    assert [split for split, _ in scored] == ["validation", "test"]


def test_scores_that_fail_are_no_oracle_without_end(hospital, monkeypatch):
    """As training before a test may, on weights that make the loss overflow for one image alone."""
    site, config = hospital(), oracle.run_config(rounds=1)
    gate, running = oracle.Gate(config), site.start(config)

    def fails(self, *args):
        raise MedFedAugError("the training loss is nan")

    monkeypatch.setattr(SiteTrainer, "evaluate_round", fails)
    errors = [running.answer(replace(gate.ask(whole(), 1, variant=n), task="test")).error for n in range(6)]
    assert ["is nan" in error for error in errors] == [True] * 3 + [False] * 3
    assert "3 answers of this job have failed" in errors[3]


def test_rounds_that_a_job_does_not_score_are_not_scored(hospital):
    config = replace(oracle.run_config(rounds=4), validate_every=2)
    running, gate = hospital().start(config), oracle.Gate(config)
    assert "round 3 is not to be scored" in running.answer(gate.ask(whole(), 3)).error
    assert running.answer(gate.ask(whole(), 2)).metrics["dice"] is not None


def test_a_job_gets_test_scores_of_one_model_in_each_round_that_it_tests(hospital):
    site, config = hospital(max_test_scores=3), replace(oracle.run_config(rounds=4), test_every=2)
    gate = oracle.Gate(config)

    def ask(round_, variant, job="one"):
        return site.start(config, job).answer(replace(gate.ask(whole(), round_, variant), task="test"))

    assert ask(2, 0).metrics["dice"] == ask(2, 0).metrics["dice"]  # the selected one, asked for again
    assert "of another model of test of round 2 have left" in ask(2, 1).error
    assert not ask(1, 2).error
    assert "of another model in the test have left" in ask(3, 3).error
    assert not ask(4, 4).error
    assert "max_test_scores of its privacy policy is 3" in ask(2, 5, "two").error


def test_scores_of_all_jobs_within_a_month_have_one_budget(hospital):
    site, config = hospital(max_validation_scores=3), oracle.run_config(rounds=2)
    gate = oracle.Gate(config)

    def ask(job, round_, variant):
        return site.start(config, job).answer(gate.ask(whole(), round_, variant))

    assert not any(ask("one", round_, round_).error for round_ in (1, 2))
    assert not ask("two", 1, 3).error
    assert (
        "scores of 3 models on its validation cases have left, and max_validation" in ask("two", 2, 4).error
    )
    assert "within 30 days" in ask("three", 1, 5).error
    assert not ask("three", 1, 1).error  # what has left already
    with sqlite3.connect(site.folder / LEDGER_FILE) as connection:
        connection.execute("UPDATE releases SET time = time - ?", (31 * DAY,))
    assert not ask("three", 1, 5).error


def test_a_training_update_leaves_without_a_score_where_there_is_no_budget_and_says_why(
    make_site, tiny_config, tmp_path
):
    for name in "AB":
        make_site(name, cases=(8, 3, 3))
    limits = {"min_images": 3, "max_validation_scores": 1}
    hospitals = [
        KitHospital(tmp_path / "kits" / name, tmp_path / "data" / name, privacy=limits, jobs={"min_cases": 1})
        for name in "AB"
    ]
    deployment = Deployment(hospitals)
    server = deployment.run(tiny_config(rounds=3))
    scores = [entry["sites"]["A"].get("val_dice") for entry in server.rounds]
    assert [score is not None for score in scores] == [True, False, False]
    assert "max_validation_scores of its privacy policy is 1" in server.results()["unvalidated"]["A"]
    told = [event for event in deployment.events if event["event"] == "unscored"]
    assert sorted(event["site"] for event in told) == ["A", "B"]  # once, and not in every round
    assert all(entry["sites"]["A"]["samples"] for entry in server.rounds)


# ---------------------------------------------------------------- evaluation jobs


def test_a_lead_gets_one_of_65_models_made_by_hand(hospital):
    """The attack of an evaluation job with "local models" of the hospital, by default rules."""
    site, config = hospital(), oracle.run_config(rounds=1)
    gate = oracle.Gate(config)
    target = oracle.Target.largest(oracle.truth(site.data, "test"))
    asked = list(target.queries(oracle.EVERYWHERE[:12], 12))
    runs = {FEDERATION: gate.run(config, whole())}
    runs |= {f"run {i}": gate.run(config, query, owner="A") for i, (_, query) in enumerate(asked)}
    found = site.evaluation(runs, "one")
    assert sum(not reply.error for reply in found.values()) == 1
    reasons = {reply.error for reply in found.values() if reply.error}
    assert len(reasons) == 1
    assert (
        "did not meet the model in a training job, and scores 1 such model in an evaluation" in reasons.pop()
    )
    # Job after job there is one budget.
    for number in range(25):
        site.evaluation({FEDERATION: gate.run(config, whole(0.01 * number))}, f"job {number}")
    assert sum(release.queries for release in entries(site)) == PrivacyPolicy().max_test_scores


def test_an_administrator_may_allow_more(hospital):
    site, config = hospital(max_unknown_models=3), oracle.run_config(rounds=1)
    gate = oracle.Gate(config)
    runs = {FEDERATION: gate.run(config, whole())}
    runs |= {f"run {i}": gate.run(config, whole(0.1 * i), owner="A") for i in range(4)}
    assert sum(not reply.error for reply in site.evaluation(runs, "one").values()) == 3
    others = {FEDERATION: gate.run(config, whole(0.7)), "run": gate.run(config, whole(0.8), owner="A")}
    strict = hospital(max_unknown_models=0).evaluation(others, "two")
    assert all(reply.error for reply in strict.values())


@pytest.mark.parametrize("methods", ["fedavg", "fedrdn,fedfa", "fedharmo", "fedbn", "fedfd_a"])
def test_models_that_a_site_met_in_training_are_scored_in_an_evaluation(
    make_site, tiny_config, tmp_path, methods
):
    """The selected model by its weights and by what methods need with it, and with nothing changed."""
    for name in "AB":
        make_site(name, cases=(8, 2, 2))
    privacy = {"min_images": 2, "max_unknown_models": 0, "allow_differences": True}
    hospitals = [
        KitHospital(
            tmp_path / "kits" / name, tmp_path / "data" / name, privacy=privacy, jobs={"min_cases": 1}
        )
        for name in "AB"
    ]
    config = tiny_config(methods, rounds=2)
    server = Deployment(hospitals).run(config)
    chosen, results = server.selection, json.loads(json.dumps(server.results()))
    assert chosen.round
    run = EvaluatedRun(
        type(config).from_dict(results["config"]),
        results["run"],
        chosen.round,
        {key: chosen.state[key].clone() for key in server.shared},
        server.payload_for_inference(chosen.payload),
        sites=("A", "B"),
    )
    path = tmp_path / "model.safetensors"
    run.save(path)
    run = EvaluatedRun.load(path, run.config)

    def scored(run, job):
        site = hospitals[0]
        site.start(config, job)
        site.executor = EvaluationExecutor(runs={FEDERATION: run.config.to_dict()})
        site.executor.log_error = lambda *args, **more: None
        evaluation = Evaluation({FEDERATION: run})
        return [site.answer(request) for request, _ in evaluation.scores(["A"])]

    replies = scored(run, "evaluation")
    assert not any(reply.error for reply in replies)
    key = next(iter(run.weights))
    changed = replace(run, weights={**run.weights, key: run.weights[key] + 1e-4})
    assert all("did not meet the model" in reply.error for reply in scored(changed, "another"))
    batch = replace(run, config=replace(run.config, batch_size=run.config.batch_size + 1))
    assert all("did not meet the model" in reply.error for reply in scored(batch, "third"))
    if run.payload:
        key = next(iter(run.payload))
        changed = replace(run, payload={**run.payload, key: run.payload[key] + 1e-4})
        assert all("did not meet the model" in reply.error for reply in scored(changed, "fourth"))


def test_a_model_that_a_job_starts_from_is_not_known_by_that(hospital):
    site, config = hospital(max_unknown_models=0), oracle.run_config(rounds=1)
    gate = oracle.Gate(config)
    running = site.start(config)
    assert not running.answer(gate.server.prepare()).error
    request = replace(gate.server.start_round(["A"]), weights=gate.weights(whole()))
    assert running.answer(request).weights
    run = replace(gate.run(config, whole()), run=gate.server.run)
    assert all("did not meet" in reply.error for reply in site.evaluation({FEDERATION: run}, "two").values())


# ---------------------------------------------------------------- rounding and noise


def test_a_mean_is_rounded_so_that_one_patient_hides_in_it():
    """Whoever knows all other patients tells a change of d from none with at most (1 + d)/2."""
    generator, draws = random.Random(1), 20_000
    for patients in (10, 20, 35, 200):
        step = step_of(patients)
        assert step >= 1 / patients or step == pytest.approx(0.01)
        for mean in (0.0, 0.31, 0.5 * step, 0.8):
            for change in (0.1, 0.5, 1.0):
                with_, without = (
                    Counter(dithered(x, step, generator) for _ in range(draws))
                    for x in (mean, mean + change / patients)
                )
                values = with_.keys() | without.keys()
                told = sum(abs(with_[value] - without[value]) for value in values) / draws / 2
                assert told < change + 0.03


def test_rounding_keeps_the_mean_and_has_half_a_step_of_deviation_everywhere():
    generator, step = random.Random(0), 0.1
    for mean in (0.4, 0.413, 0.45, 0.499):
        values = [dithered(mean, step, generator) for _ in range(20_000)]
        assert fmean(values) == pytest.approx(mean, abs=0.002)
        assert stdev(values) == pytest.approx(step / 2, abs=0.002)
        assert {round(value / step, 6) % 1 for value in values} == {0.0}


def test_a_patient_with_many_cases_makes_the_steps_coarser():
    cases = {f"c{n}": 0.5 for n in range(40)}
    alone = dict.fromkeys(list(cases)[:10], 0)
    patients = {case: alone.get(case, n) for n, case in enumerate(cases)}
    found, policy = {"dice": 0.5, "cases": cases}, PrivacyPolicy()
    values = {released_scores(found, policy, patients)["dice"] for _ in range(300)}
    assert values <= {0.0, 0.5, 1.0}  # a quarter of the cases is one patient's: steps of 0.5
    values = {released_scores(found, policy)["dice"] for _ in range(300)}
    assert values == {0.45, 0.5, 0.55}


def test_no_distance_and_no_mean_over_few_of_a_class_leaves():
    cases = {f"c{n}": 1.0 for n in range(30)}
    found = {"accuracy": 0.9, "balanced_accuracy": 0.8, "auc": 0.7, "cases": cases, "classes": {"a": {}}}
    labels = {case: "a" if n < 20 else "b" for n, case in enumerate(cases)}
    left = released_scores(found, PrivacyPolicy(), labels=labels)
    assert all(left[name] is not None for name in ("accuracy", "balanced_accuracy", "auc"))
    assert "classes" not in left
    few = {**labels, "c20": "a"}  # nine of b
    left = released_scores(found, PrivacyPolicy(), labels=few)
    assert left["accuracy"] is not None
    assert left["balanced_accuracy"] is None
    assert left["auc"] is None
    assert released_scores(found, PrivacyPolicy())["balanced_accuracy"] is None
    distances = {"dice": 0.5, "hd95": 3.0, "nsd": 0.7, "cases": cases}
    distances["case_metrics"] = {"hd95": dict.fromkeys(cases, 3.0), "nsd": dict.fromkeys(cases, 0.7)}
    left = released_scores(distances, PrivacyPolicy())
    assert left["hd95"] is None
    assert left["nsd"] is not None
    assert "unit" not in left


def test_a_training_loss_is_clipped_and_rounded_like_a_score_where_any_leaves():
    few, losses = {f"c{n}": 0.5 for n in range(9)}, {f"c{n}": 0.5 for n in range(10)}
    policy, most = PrivacyPolicy(losses=True), largest_loss(2)
    step = round(0.1 * most, 9)
    assert released_loss(losses, PrivacyPolicy(), 2) is None
    assert released_loss(losses, PrivacyPolicy(scores="cases"), 2) is None
    assert released_loss(few, policy, 2) is None
    # A hundred cases of one patient are one patient's.
    assert (
        released_loss({f"c{n}": 0.5 for n in range(100)}, policy, 2, {f"c{n}": 0 for n in range(100)}) is None
    )
    found = {round(released_loss(losses, policy, 2) / step, 6) for _ in range(300)}
    assert found == {2.0, 3.0, 4.0}
    # Whatever loss a model made by hand has for one patient, the mean moves by a step at most.
    for loud in (1e6, float("inf"), float("nan"), -1e6):
        told = [released_loss({**losses, "c0": loud}, policy, 2) for _ in range(2000)]
        assert abs(fmean(told) - 0.5) <= most / 10 + 0.01
        assert max(told) <= most
    noisy = PrivacyPolicy(losses=True, score_noise_multiplier=1.5, max_epsilon=9.0)
    generator = random.Random(0)
    middle = dict.fromkeys(losses, largest_loss(40) / 2)
    values = [released_loss(middle, noisy, 40, generator=generator) for _ in range(5000)]
    assert stdev(values) == pytest.approx(largest_loss(40) * 0.15, rel=0.05)


def inside(gate, query) -> dict:
    """A model whose cross-entropy is huge where a slice has a lesion in a pattern, and else small."""
    weights, own = gate.weights(query), slice(oracle.SIDE - 1, 2 * oracle.SIDE - 1)
    weights[gate.up][:, 1, own, own] *= -5e4
    weights[gate.up.replace("weight", "bias")][0] = 0.0
    return weights


def one_epoch(rounds: int, **changes):
    """A job that default rules admit, in which a site's training changes nothing."""
    network = {**oracle.run_config(rounds).network_args, "adn_ordering": "A"}
    changes = {
        "loss": "cross_entropy",
        "local_steps": 0,
        "local_epochs": 1,
        "learning_rate": 1e-30,
        **changes,
    }
    return replace(oracle.run_config(rounds), network_args=network, augmentation="none", **changes)


@pytest.fixture
def kits(phantom, tmp_path):
    """Two hospitals with kits of their own, as a federation of theirs."""

    def make(**privacy) -> Deployment:
        (images,) = phantom.glob("site_*")
        data = {name: Path(shutil.copytree(images, tmp_path / "data" / name)) for name in "AB"}
        return Deployment([KitHospital(tmp_path / "kits" / n, data[n], privacy=privacy) for n in "AB"])

    return make


def numbers(told) -> list[float]:
    """All numbers of a message or of a record, but times and sizes."""
    if isinstance(told, dict):
        return [n for key, value in told.items() if key != "seconds" for n in numbers(value)]
    if isinstance(told, list):
        return [n for value in told for n in numbers(value)]
    return [told] if isinstance(told, (int, float)) else []


def test_no_number_of_an_update_tells_a_server_where_a_patient_has_a_lesion(kits, phantom):
    """64 training losses of one job gave all of a patient's slice, with a correlation of 0.9999995."""
    site, config = kits().hospitals["A"], one_epoch(4)
    site.start(config, "job")
    gate, target = (
        oracle.Gate(config),
        oracle.Target.largest(oracle.truth(next(phantom.glob("site_*")), "training")),
    )
    by_lesion = sorted(oracle.EVERYWHERE, key=lambda cell: target.lesion[cell])
    asked, told = [by_lesion[0], by_lesion[-1], by_lesion[-2]], []
    assert target.lesion[asked[0]] == 0 < target.lesion[asked[2]]
    for round_, cell in enumerate(asked, start=1):
        query = oracle.Query(target.low, target.high, oracle.cells(cell))
        request = replace(gate.server.start_round(["A"]), weights=inside(gate, query), round=round_)
        reply = site.answer(request)
        assert not reply.error
        assert reply.weights
        assert "train_loss" not in reply.metrics
        score = reply.metrics.pop("val_dice", None)
        assert score is None or score == pytest.approx(round(score, 1))
        told.append([*numbers(reply.metrics), reply.num_samples])
    assert told[0] == told[1] == told[2]


def test_no_number_of_a_record_tells_a_lead_where_a_patient_has_a_lesion(kits, phantom, tmp_path):
    """Six jobs of one round, each with weights of the lead's, had told the cell with a correlation of 1."""
    deployment, target = kits(), oracle.Target.largest(oracle.truth(next(phantom.glob("site_*")), "training"))
    by_lesion = sorted(oracle.EVERYWHERE, key=lambda cell: target.lesion[cell])
    records = []
    for job, cell in enumerate((by_lesion[0], by_lesion[-1])):
        gate = oracle.Gate(one_epoch(1))
        torch.save(
            inside(gate, oracle.Query(target.low, target.high, oracle.cells(cell))), tmp_path / "init.pt"
        )
        initial = InitialWeights.read(tmp_path / "init.pt", gate.server.state)
        server = deployment.run(replace(one_epoch(1), init=initial.digest, seed=job), initial=initial)
        told = [event for event in deployment.events if event["event"] == "trained"]
        found = [server.results()["rounds"][0]["sites"]["A"], next(e for e in told if e["site"] == "A")]
        assert "train_loss" not in json.dumps([server.results(), deployment.events])
        for entry in found:
            entry.pop("val_dice", None)
        records.append(numbers(found))
    assert records[0] == records[1]


def test_losses_that_a_site_lets_out_have_the_budget_of_scores(kits, phantom):
    deployment = kits(losses=True, max_validation_scores=2)
    site, config = deployment.hospitals["A"], one_epoch(6)
    site.start(config, "job")
    gate, target = (
        oracle.Gate(config),
        oracle.Target.largest(oracle.truth(next(phantom.glob("site_*")), "training")),
    )
    cells = sorted(oracle.EVERYWHERE, key=lambda cell: -target.lesion[cell])

    def ask(round_, cell):
        query = oracle.Query(target.low, target.high, oracle.cells(cell))
        return site.answer(replace(gate.server.start_round(["A"]), weights=inside(gate, query), round=round_))

    patients, most = 30, largest_loss(2)
    first = ask(1, cells[0]).metrics["train_loss"]
    share = first / most / step_of(patients)
    assert share == pytest.approx(round(share))
    assert ask(1, cells[0]).metrics["train_loss"] == first  # again, as a server that was started anew asks
    assert "train_loss" not in ask(1, cells[1]).metrics  # of another model in the same round
    assert ask(2, cells[1]).metrics["train_loss"] is not None
    last = ask(3, cells[2])
    assert last.weights
    assert "train_loss" not in last.metrics
    site.start(config, "another job")
    assert "train_loss" not in ask(1, cells[3]).metrics
    ledger = PrivacyLedger(site.kit / "medfedaug" / LEDGER_FILE)
    losses = [entry.release for entry in ledger.entries() if entry.release.kind == "losses"]
    assert [release.queries for release in losses] == [1, 0, 1]
    assert {(release.split, release.count) for release in losses} == {("training", patients)}


def test_what_a_months_losses_tell_of_a_lesion_is_bounded(phantom):
    """The whole budget against one patient: a correlation of 1 before."""
    patients, generator = oracle.truth(next(phantom.glob("site_*")), "training"), random.Random(0)
    target, policy = oracle.Target.largest(patients), PrivacyPolicy(losses=True)
    found = []
    for _ in range(20):
        said = []
        for cell, _ in target.queries(oracle.EVERYWHERE, policy.max_validation_scores):
            by_case = {str(n): 0.7 for n in range(len(patients))} | {
                "0": 0.7 + 1e6 * bool(target.lesion[cell])
            }
            said.append((cell, released_loss(by_case, policy, 2, generator=generator)))
        found.append(target.correlation(said))
    assert fmean(found) < 0.65


def test_losses_with_noise_are_in_the_account_of_epsilon(kits):
    site, rounds = kits(losses=True, score_noise_multiplier=4.0, max_epsilon=2.0).hospitals["A"], range(1, 6)
    config = one_epoch(len(rounds))
    site.start(config, "job")
    server = FederationServer(config)
    request = server.start_round(["A"])
    told = []
    for round_ in rounds:
        weights = {key: value + 0.01 * round_ for key, value in request.weights.items()}
        told.append(site.answer(replace(request, weights=weights, round=round_)).metrics)
    most = max(n for n in rounds if epsilon_spent([(4.0, n)], 1e-5) <= 2.0)
    assert sum("train_loss" in metrics for metrics in told) == most < len(rounds)
    cases = case_identities(open_site(site.data), "training")
    ledger = PrivacyLedger(site.kit / "medfedaug" / LEDGER_FILE)
    assert ledger.releases(cases) == [(4.0, most, 1.0)]


@pytest.mark.parametrize("method", ["feddg_ga"])
def test_methods_that_exchange_losses_are_refused_where_these_stay(method, make_site, tiny_config, tmp_path):
    for name in "AB":
        make_site(name, cases=(8, 1, 1))

    def deploy(**privacy) -> Deployment:
        settings = {"privacy": {"min_images": 3, **privacy}, "jobs": {"min_cases": 1}}
        return Deployment(
            [KitHospital(tmp_path / "kits" / n, tmp_path / "data" / n, **settings) for n in "AB"]
        )

    with pytest.raises(RunFailed, match=rf"{method} sends losses over training images.*site-config --losses"):
        deploy().run(tiny_config(method, rounds=2))
    deployment = deploy(losses=True)
    server = deployment.run(tiny_config(method, rounds=2))
    sent = [
        value
        for _, reply in deployment.replies
        if reply.task == TRAIN
        for value in (reply.payload[f"{method}/loss"] / largest_loss(2)).tolist()
    ]
    steps = [value / step_of(8) for value in (sent if method == "feddg_ga" else sent[::2])]
    assert steps == [pytest.approx(round(value), abs=1e-4) for value in steps]
    assert any(steps)
    assert set(server.results()["rounds"][-1]["sites"]) == {"A", "B"}
    assert not any("/" in key for key in server.results()["rounds"][-1]["sites"]["A"])


def test_a_training_that_fails_counts_as_an_update(kits):
    """That it fails may follow from one image: a server cannot ask without end."""
    site, config = kits().hospitals["A"], oracle.run_config(1)
    site.start(config, "job")
    site.signal.trigger(True)
    told = [site.answer(FederationServer(config).start_round(["A"])).error for _ in range(5)]
    assert all("the training was stopped" in error for error in told[:3])
    assert all("3 updates have left in this job of 1 round, failed ones" in error for error in told[3:])


def test_noise_on_scores_is_in_the_account_of_epsilon(hospital):
    site, config = hospital(score_noise_multiplier=2.0, max_epsilon=4.0), oracle.run_config(rounds=20)
    gate, running = oracle.Gate(config), site.start(config)
    replies = [running.answer(gate.ask(whole(), round_, round_)) for round_ in range(1, 21)]
    given = [reply for reply in replies if not reply.error]
    most = max(n for n in range(1, 21) if epsilon_spent([(2.0, n)], 1e-5) <= 4.0)
    assert len(given) == most < 20
    assert "privacy budget spent: the validation scores of one more model would exceed" in replies[-1].error
    ledger = PrivacyLedger(site.folder / LEDGER_FILE)
    cases = case_identities(open_site(site.data), "validation")
    assert ledger.releases(cases) == [(2.0, most, 1.0)]
    assert all("scored_cases" not in reply.metrics for reply in given)
    # The same again costs nothing.
    assert running.answer(gate.ask(whole(), 1, 1)).metrics == given[0].metrics
    with pytest.raises(ConfigError, match="noise on scores is for means"):
        PrivacyPolicy(scores="cases", score_noise_multiplier=1.0, max_epsilon=1.0)


def test_noise_on_scores_has_the_deviation_of_its_multiplier():
    cases = {f"c{n}": 0.4 + 0.02 * (n % 10) for n in range(20)} | {"none": None}
    policy = PrivacyPolicy(score_noise_multiplier=1.5, max_epsilon=9.0)
    found, generator = {"dice": 0.49, "cases": cases}, random.Random(0)
    values = [released_scores(found, policy, generator=generator)["dice"] for _ in range(20_000)]
    assert stdev(values) == pytest.approx(1.5 / 21, rel=0.03)
    assert fmean(values) == pytest.approx((20 * 0.49 + 0.5) / 21, abs=0.003)  # the middle for one without


# ---------------------------------------------------------------- the attacks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("privacy", "most"),
    [({}, 0.65), ({"score_noise_multiplier": 6.4, "max_epsilon": 8.0}, 0.4)],
    ids=["default", "noise"],
)
def test_a_server_that_knows_a_slice_hardly_finds_the_lesion_there(hospital, privacy, most):
    """300 exact scores gave r = 1.00; a site gives 100, rounded. Chance alone reaches 0.25 in one of 40."""
    site, config = hospital(**privacy), oracle.run_config(rounds=300)
    gate, running = oracle.Gate(config), site.start(config)
    target = oracle.Target.largest(oracle.truth(site.data, "validation"))
    said, refused = [], 0
    for round_, (cell, query) in enumerate(target.queries(oracle.EVERYWHERE, 120), start=1):
        reply = running.answer(gate.ask(query, round_, round_))
        if reply.error:
            refused += 1
        else:
            said.append((cell, reply.metrics["dice"]))
    assert len(said) <= 100
    assert refused >= 20
    assert target.correlation(said) < most


@pytest.mark.slow
def test_a_server_that_knows_nothing_finds_no_lesions(hospital):
    """259 exact scores named 19 slices with a lesion, and all were right."""
    site, config = hospital(), oracle.run_config(rounds=300)
    gate, running = oracle.Gate(config), site.start(config)
    rounds = iter(range(1, 301))

    def ask(query):
        round_ = next(rounds)
        return running.answer(gate.ask(query, round_, round_)).metrics.get("dice", 0.0)

    _, right = oracle.blind(ask, oracle.truth(site.data, "validation"), 300)
    assert right <= 3
