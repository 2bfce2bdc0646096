"""Sites score models that others trained: in process, and as a job in NVFlare's simulator."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from results import Page
from running import command

from medfedaug.config.run import RunConfig
from medfedaug.data.phantom import make_phantom
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation.in_process import SitesInProcess
from medfedaug.federation.messages.messages import Reply
from medfedaug.federation.protocol import evaluate
from medfedaug.federation.server.evaluation import FEDERATION, Evaluation
from medfedaug.federation.site.evaluation import EvaluationSite
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.privacy import (
    LEDGER_FILE,
    JobBook,
    JobRules,
    PrivacyLedger,
    PrivacyPolicy,
    Pseudonyms,
)
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.hospital.privacy.guarded_gate import GuardedGate
from medfedaug.hospital.secure.identity import Identity
from medfedaug.metrics.significance import paired_t_test
from medfedaug.research.comparison.local_vs_global import worth_table
from medfedaug.runs.site_evaluation import evaluate_sites, evaluated_runs

SITES = ("site_A", "site_B")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory) -> Path:
    """Two sites with six test cases each, and runs of them: Ditto's, FedBN's, and every site for itself."""
    root = tmp_path_factory.mktemp("hospitals")
    for folder in make_phantom(root / "data", sites=2, patients=9, shape=(24, 24, 3), seed=0):
        listing = folder / "dataset.json"
        content = json.loads(listing.read_text())
        cases = [case for split in ("test", "validation", "training") for case in content[split]]
        content |= {"test": cases[:6], "validation": cases[6:7], "training": cases[7:]}
        listing.write_text(json.dumps(content))
    network = {"features": [4] * 6, "norm": ["instance", {"affine": True}]}
    for methods, rounds, steps in (("ditto", 2, 4), ("single", 2, 4), ("fedbn", 1, 1)):
        code, _, err = command(
            *("simulate", "--data", root / "data", "--methods", methods, "--out", root / "runs" / methods),
            *("--engine", "inprocess", "--rounds", rounds, "--local-steps", steps, "--batch-size", 4),
            *("--lr", 0.02, "--network-args", json.dumps(network), "--threads", 1, "--device", "cpu"),
            "--no-report",
        )
        assert code == 0, err
    return root


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def dice(evaluation: dict, model: str) -> dict[str, float]:
    return {site: models[model]["dice"] for site, models in evaluation["sites"].items() if model in models}


def scores_of(folder: Path) -> dict[str, float]:
    return {site: scores["dice"] for site, scores in results(folder)["test"]["sites"].items()}


@pytest.fixture(scope="module")
def compared(hospitals):
    """Ditto's run against the local models, and what the command prints."""
    runs, out = hospitals / "runs", hospitals / "runs/ditto/evaluation.json"
    options = ("--data", hospitals / "data", "--local", runs / "single", "--out", out)
    code, printed, err = command("evaluate", "--model", runs / "ditto", *options)
    assert code == 0, err
    return json.loads(out.read_text()), printed


def test_each_site_compares_local_global_and_personal_model_on_its_own_cases(hospitals, compared):
    record, printed = compared
    assert dice(record, "personal") == pytest.approx(scores_of(hospitals / "runs/ditto"))
    assert dice(record, "local") == pytest.approx(scores_of(hospitals / "runs/single"))
    # Ditto's global model is that of the run without Ditto, and is scored without the personal one.
    assert dice(record, "global") != pytest.approx(dice(record, "personal"))
    for site, models in record["sites"].items():
        for other in ("local", "global"):
            ours, theirs = models["personal"]["cases"], models[other]["cases"]
            test = paired_t_test([ours[c] for c in sorted(ours)], [theirs[c] for c in sorted(ours)])
            comparison = models["personal"]["against"][other]
            assert comparison["difference"] == pytest.approx(test.difference)
            assert (comparison["low"], comparison["high"]) == pytest.approx((test.low, test.high))
            assert (comparison["cases"], comparison["p"]) == (6, pytest.approx(test.p))
        for model in ("global", "personal"):
            comparison = models[model]["against"]["local"]["difference"]
            assert f"{site}, {model} model: {comparison:+.3f} Dice against its own local model" in printed
    assert "Too few cases for a verdict: 6 of 20." in printed
    assert record["models"]["personal"]["scored"] == "personal (own weights)"


def test_the_page_answers_whether_the_federation_is_worth_it(run, hospitals, compared, tmp_path):
    record, _ = compared
    page, tables = tmp_path / "page.html", tmp_path / "tables"
    code, _, err = run("report", hospitals / "runs/ditto/evaluation.json", "--out", page, "--tables", tables)
    assert code == 0, err
    text = Page(page.read_text()).text
    assert "Is the federation worth it for a site?" in text
    for row in worth_table(record).rows:
        assert row.sentence("dice") in text
    assert "personal (own weights)" in text
    rows = list(csv.DictReader((tables / "worth.csv").open()))
    assert [(row["site"], row["model"]) for row in rows] == [
        (site, model) for site in SITES for model in ("global", "personal (own weights)")
    ]
    assert float(rows[0]["local"]) == pytest.approx(dice(record, "local")["site_A"])
    # A run's folder with an evaluation in it shows both.
    code, _, err = run("report", hospitals / "runs/ditto", "--out", page)
    assert code == 0, err
    text = Page(page.read_text()).text
    assert "Is the federation worth it for a site?" in text
    assert "Dice on the test cases" in text


def test_a_site_that_trained_and_is_not_there_is_named(hospitals, tmp_path):
    shutil.copytree(hospitals / "data/site_A", tmp_path / "site_A")
    record = evaluate_sites(hospitals / "runs/ditto", tmp_path, device="cpu")
    assert set(record["sites"]) == {"site_A"}
    assert record["missing"] == {"site_B": {"global": "site site_B is not connected"}}
    assert "site_B, not scored (global): site site_B is not connected." in worth_table(record).notes


def test_a_global_model_that_is_not_whole_has_no_score_and_local_runs_are_given_by_site(hospitals):
    local = [f"{site}={hospitals / 'runs/single'}" for site in SITES]
    record = evaluate_sites(hospitals / "runs/fedbn", hospitals / "data", local=local, device="cpu")
    assert dice(record, "global") == dict.fromkeys(SITES)
    assert dice(record, "personal") == pytest.approx(scores_of(hospitals / "runs/fedbn"))
    assert dice(record, "local") == pytest.approx(scores_of(hospitals / "runs/single"))


def test_what_does_not_go_together_is_refused_with_a_reason(run, hospitals, tmp_path):
    def refused(*arguments) -> str:
        code, _, err = run(*arguments)
        assert code == 2
        assert not (tmp_path / "job").exists()
        return " ".join(err.split())

    evaluation = ("evaluate", "--data", hospitals / "data", "--model")
    assert "share some of the network" in refused(
        *evaluation, hospitals / "runs/ditto", "--local", hospitals / "runs/fedbn"
    )
    assert "share no model" in refused(*evaluation, hospitals / "runs/single", "--engine", "inprocess")
    assert "is not whole" in refused(
        *evaluation, hospitals / "runs/ditto", "--local", f"site_C={hospitals / 'runs/single'}"
    )
    assert "already" in refused(
        *evaluation, hospitals / "runs/ditto", *["--local", hospitals / "runs/single"] * 2
    )
    job = ("export", "--out", tmp_path / "job")
    assert "a job is a run, an evaluation or a comparison: give --methods" in refused(*job)
    assert "--rounds is for a run" in refused(*job, "--evaluate", hospitals / "runs/ditto", "--rounds", 3)


# ---------------------------------------------------------------- what leaves a site


def test_the_ledger_has_each_release_under_the_cases_of_its_own_run(hospitals, tmp_path):
    """Runs that saw other numbers of cases are asked in turn, and each stays with its own."""
    runs, states = evaluated_runs(hospitals / "runs/ditto", [str(hospitals / "runs/single")])
    limits = {key: None if key == FEDERATION else 4 for key in runs}
    runs = {key: replace(run, config=replace(run.config, limit=limits[key])) for key, run in runs.items()}
    policy = PrivacyPolicy(min_images=2)
    rules, names = JobRules(allow_limit=True), Pseudonyms(b"key")
    book = JobBook(tmp_path / "jobs")
    gate = GuardedGate("site_A", rules, names, book, "job", "approve", Identity)
    trainers = {
        key: SiteTrainer(
            *(run.config, hospitals / "data", "cpu", states[key] / "site_A"),
            SitePrivacy(policy, tmp_path / LEDGER_FILE),
        )
        for key, run in runs.items()
    }
    evaluation = Evaluation(runs)
    evaluate(evaluation, SitesInProcess({"site_A": EvaluationSite("site_A", trainers, gate)}))
    assert set(evaluation.results()["sites"]["site_A"]) == {"local", "global", "personal"}
    entries = PrivacyLedger(tmp_path / LEDGER_FILE).entries()
    scores = [entry for entry in entries if entry.release.kind == "scores"]
    assert [entry.release.count for entry in scores] == [4, 6, 6]
    assert len({entry.cases for entry in scores}) == 2


def test_the_server_drops_impossible_differences(hospitals):
    runs, _ = evaluated_runs(hospitals / "runs/ditto", [str(hospitals / "runs/single")])
    evaluation = Evaluation(runs)
    for request, _ in evaluation.scores(["site_A"]):
        against = {
            "local": {"difference": 7.0, "low": "x", "p": 3, "cases": -1},
            "other": {"difference": 0.1},
        }
        reply = Reply(request.task, metrics={"dice": 3.0, "cases": {"a": 0.5}, "against": against})
        assert evaluation.accept_scores("site_A", reply)
    scores = evaluation.results()["sites"]["site_A"]["global"]
    assert scores["dice"] is None
    assert scores["against"] == {"local": dict.fromkeys(("difference", "low", "high", "p", "cases"))}
    broken = Evaluation(runs)
    for _ in broken.scores(["site_A"]):
        assert not broken.accept_scores("site_A", Reply("score", error="site A: no disk"))
    with pytest.raises(RunFailed, match="no disk"):
        broken.finish()


# ---------------------------------------------------------------- the job


def test_the_job_carries_numbers_and_no_code(run, hospitals, tmp_path):
    job = tmp_path / "job"
    code, printed, err = run(
        *("export", "--evaluate", hospitals / "runs/ditto", "--local", hospitals / "runs/single"),
        *("--min-sites", 2, "--round-timeout", 60, "--out", job),
    )
    assert code == 0, err
    assert "nvflare job submit" in printed
    files = [path.relative_to(job) for path in job.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    text = "".join((job / path).read_text() for path in files if path.suffix == ".json")
    assert not re.search(r"\"/(?!/)[a-z]+/", text)
    paths = set(re.findall(r"\"path\": \"(medfedaug[^\"]+)\"", text))
    module = "medfedaug.nvflare_jobs.job.evaluation."
    assert paths == {f"{module}EvaluationController", f"{module}EvaluationExecutor"}


@pytest.mark.slow  # NVFlare's processes
def test_the_job_in_nvflares_simulator_gives_what_is_had_in_process(run, hospitals, compared, tmp_path):
    out = tmp_path / "evaluation.json"
    code, printed, err = run(
        *("evaluate", "--model", hospitals / "runs/ditto", "--data", hospitals / "data", "--device", "cpu"),
        *("--local", hospitals / "runs/single", "--engine", "nvflare", "--out", out),
    )
    assert code == 0, err
    record, expected = json.loads(out.read_text()), compared[0]
    assert record == expected
    assert fmean(dice(record, "local").values()) == pytest.approx(record["mean"]["local"]["dice"])
    assert "site_A, personal model: " in printed


def test_a_model_of_a_job_is_checked_when_it_is_read(hospitals, tmp_path):
    runs, _ = evaluated_runs(hospitals / "runs/ditto", [str(hospitals / "runs/single")])
    run, path = runs[FEDERATION], tmp_path / "model.safetensors"
    run.save(path)
    again = type(run).load(path, run.config)
    assert again.summary() == run.summary()
    assert all(bool((again.weights[key] == value).all()) for key, value in run.weights.items())
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read as a model"):
        type(run).load(path, run.config)
    small = RunConfig.from_dict({**run.config.to_dict(), "network_args": {"features": [1] * 6}})
    path.write_bytes(bytes(2**24))
    with pytest.raises(ConfigError, match="larger than a model"):
        type(run).load(path, small)
