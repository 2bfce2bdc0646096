"""Sites compare a finished run with the models that they trained by themselves."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from results import Page
from running import command

from medfedaug.data.phantom import make_phantom
from medfedaug.metrics.significance import paired_t_test
from medfedaug.research.comparison.local_vs_global import worth_table
from medfedaug.runs.evaluate import evaluate_sites

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
        assert row.sentence in text
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
    runs = hospitals / "runs"
    record = evaluate_sites(runs / "ditto", tmp_path, runs / "single", device="cpu")
    assert set(record["sites"]) == {"site_A"}
    assert worth_table(record).notes[-1].startswith("site_B, not scored (global): site site_B is not in")


def test_a_global_model_that_is_not_whole_has_no_score(hospitals):
    runs = hospitals / "runs"
    record = evaluate_sites(runs / "fedbn", hospitals / "data", runs / "single", device="cpu")
    assert dice(record, "global") == dict.fromkeys(SITES)
    assert dice(record, "personal") == pytest.approx(scores_of(runs / "fedbn"))
    assert dice(record, "local") == pytest.approx(scores_of(runs / "single"))


@pytest.mark.parametrize(
    ("model", "local", "expected"),
    [("ditto", "fedbn", "share some of the network"), ("single", "single", "share no model")],
)
def test_runs_that_do_not_go_together_are_refused(run, hospitals, model, local, expected):
    runs = hospitals / "runs"
    options = ("--data", hospitals / "data", "--model", runs / model, "--local", runs / local)
    code, _, err = run("evaluate", *options)
    assert code == 2
    assert expected in " ".join(err.split())
