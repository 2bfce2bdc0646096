"""Whose model a score is of, and what of a site's scores leaves it."""

from __future__ import annotations

import json

import pytest
from running import TINY_OPTIONS

from medfedaug.errors import ConfigError
from medfedaug.federation import FederationServer, run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.metrics.registry import metric_names
from medfedaug.privacy import PrivacyPolicy, released_scores
from medfedaug.privacy.score_release import step_of

SITES = ["site_A", "site_B", "site_C"]


@pytest.mark.parametrize(
    ("methods", "settings", "validation", "test"),
    [
        ("fedavg", None, "global", "global"),
        ("fedrdn,fedfa", None, "global", "global"),  # statistics of its own images are no model
        ("fedbn", None, "personal (own layers)", "personal (own layers)"),
        ("ditto", None, "personal (own weights)", "personal (own weights)"),
        ("finetune", {"finetune": {"epochs": 2}}, "global", "personal (fine-tuned)"),
        ("finetune", {"finetune": {"epochs": 0}}, "global", "global"),
        ("fedbn,finetune", None, "personal (own layers)", "personal (own layers, fine-tuned)"),
        ("single", None, "local", "local"),
        ("single,fedrdn", None, "local", "local"),
    ],
)
def test_whose_model_a_score_is_of_follows_from_the_composition(
    tiny_config, methods, settings, validation, test
):
    scored = Composition(tiny_config(methods, settings=settings)).scored
    assert scored == {"validation": validation, "test": test, "unseen": "unseen"}


@pytest.mark.parametrize(("methods", "model"), [("fedavg", "global"), ("fedper", "personal (own layers)")])
def test_results_and_terminal_say_whose_model_was_scored(run, phantom_dir, tmp_path, methods, model):
    out = tmp_path / "out"
    code, printed, err = run(
        *("simulate", "--data", phantom_dir, "--methods", methods, "--out", out, "--rounds", 1),
        *("--engine", "inprocess", *TINY_OPTIONS, "--threads", 1),
        *("--batch-size", 4, "--no-report"),
    )
    assert code == 0, err
    scored = json.loads((out / "results.json").read_text())["scored"]
    assert scored == {"validation": model, "test": model, "unseen": "unseen"}
    lines = {line.split()[1]: line for line in printed.splitlines() if "site_" in line}
    assert model.split()[0] in lines["site_A"]  # a narrow terminal breaks the line
    assert "unseen" in lines["site_C"].replace("(unseen)", "")
    again = tmp_path / "again.json"
    code, printed, err = run("evaluate", "--model", out, "--data", phantom_dir, "--out", again)
    assert code == 0, err
    found = json.loads(again.read_text())["scored"]
    assert found == {"site_A": model, "site_B": model, "site_C": "unseen"}
    code, printed, err = run("evaluate", "--model", out, "--data", phantom_dir / "site_A")
    assert "global (no site" in printed or model.split()[0] in printed


# ---------------------------------------------------------------- what leaves a site

FOUND = {
    **dict.fromkeys(metric_names("segmentation")),
    "dice": 0.51499,
    "hd95": 6.2499,
    "nsd": None,
    "missed": 1,
    "undivided": 1,
    "unit": "mm",
    "classes": {"lesion": {"dice": 0.51499}},
    "cases": {"anna": 0.6, "bert": 0.42998, "carl": None},
    "case_metrics": {"hd95": {"anna": 6.2499, "bert": None, "carl": None}, "nsd": {}},
}


def test_a_site_sends_all_of_its_scores_or_rounded_means_over_enough_cases():
    assert released_scores(FOUND, PrivacyPolicy(scores="cases")) == FOUND
    assert released_scores(FOUND, PrivacyPolicy())["cases"] == {}
    summary = released_scores(FOUND, PrivacyPolicy(min_images=2, scores="summary"))
    assert summary.pop("dice") in (0.0, 0.5, 1.0)  # over two cases, each half of it
    assert summary == {**dict.fromkeys(metric_names("segmentation")[1:]), "cases": {}, "scored_cases": 2}
    few = released_scores(FOUND, PrivacyPolicy(min_images=3, scores="summary"))
    assert few.pop("note").startswith("fewer than 3 cases with a score, and this site sends means from 3 on")
    assert few == {**dict.fromkeys(metric_names("segmentation")), "cases": {}}
    with pytest.raises(ConfigError, match="scores 'all' is not known; choose from summary, cases"):
        PrivacyPolicy(scores="all")


def test_no_score_of_a_case_leaves_sites_that_allow_summaries_alone(phantom_dir, tiny_config, monkeypatch):
    arrived = []
    for name in ("accept", "accept_validation", "accept_test"):
        original = getattr(FederationServer, name)

        def watched(self, site, reply, original=original):
            arrived.append((site, reply.task, json.dumps(reply.metrics)))
            return original(self, site, reply)

        monkeypatch.setattr(FederationServer, name, watched)
    config = tiny_config("fedavg", rounds=2)
    plain = run_in_process(config, phantom_dir, SITES, "cpu").results()
    names = {case for entry in plain["test"]["sites"].values() for case in entry["cases"]}
    assert any(case in text for _, _, text in arrived for case in names)
    arrived.clear()
    limits = PrivacyPolicy(min_images=1, scores="summary")
    results = run_in_process(config, phantom_dir, SITES, "cpu", policy=limits).results()
    assert {task for _, task, _ in arrived} == {"train", "validate", "test"}
    unseen = plain["test"]["unseen"]["site_C"]
    names |= set(unseen["cases"])
    assert not any(case in text for _, _, text in arrived for case in names)
    for group in ("sites", "unseen"):
        for site, entry in results["test"][group].items():
            full = plain["test"][group][site]
            assert abs(entry["dice"] - full["dice"]) <= 1.5 * step_of(entry["scored_cases"])
            assert entry["scored_cases"] == sum(score is not None for score in full["cases"].values())
            assert entry["cases"] == {}
            assert "classes" not in entry
    # Sites with too few cases have no score; the run goes on without.
    strict = PrivacyPolicy(min_images=4, scores="summary")
    results = run_in_process(config, phantom_dir, SITES, "cpu", policy=strict).results()
    assert all(entry["dice"] is None for entry in results["test"]["sites"].values())
    assert "from 4 on" in results["test"]["sites"]["site_A"]["note"]
    assert results["test"]["unseen"]["site_C"]["dice"] is not None
