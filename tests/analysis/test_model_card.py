"""The model card: what a run left, in words, and nothing that a site did not let out."""

import json
import math
from datetime import datetime, timedelta
from statistics import fmean, stdev

import pytest
import torch
from running import TINY_NETWORK, command

from medfedaug.analysis.model_card import model_card
from medfedaug.config.run import job_hash
from medfedaug.data.sites import find_sites
from medfedaug.methods import parse_methods
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.simulate import configure, simulate

SECTIONS = ["Use", "Training data", "Training", "Scores", "Not tested", "Privacy", "Identity"]


@pytest.fixture(scope="module")
def finished(phantom_dir, tmp_path_factory):
    """A run with an unseen site, that `simulate` made."""
    out = tmp_path_factory.mktemp("run") / "run"
    methods = tuple(parse_methods("fedrdn,fedfa", {"fedfa": {"prob": 0.3}}))
    config = configure(
        find_sites(phantom_dir), methods=methods, **TINY_NETWORK, rounds=1, batch_size=4, seed=3
    )
    torch.set_num_threads(1)
    simulate(phantom_dir, out, config, engine="inprocess", device="cpu", report=False)
    return out


def changed(finished, folder, change) -> FinishedRun:
    """The run with another record."""
    record = json.loads((finished / "results.json").read_text())
    change(record)
    (folder / "results.json").write_text(json.dumps(record))
    (folder / "global_model.pt").write_bytes((finished / "global_model.pt").read_bytes())
    return FinishedRun.open(folder)


def section(card, title: str) -> str:
    text = card.markdown()
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_simulate_leaves_a_card_with_all_sections(finished):
    text, page = ((finished / f"model_card{suffix}").read_text() for suffix in (".md", ".html"))
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == SECTIONS
    for title in SECTIONS:
        assert f"<h2>{title}</h2>" in page
    assert "not a medical device" in text
    assert FinishedRun.open(finished).sha256 in text
    assert "http" not in page.replace("http-equiv", "")


def test_names_of_sites_and_cases_stay_out_unless_asked_for(finished, tmp_path):
    record = json.loads((finished / "results.json").read_text())
    sites = {**record["test"]["sites"], **record["test"]["unseen"]}
    cases = {case for entry in sites.values() for case in entry["cases"]}
    for suffix in (".md", ".html"):
        text = (finished / f"model_card{suffix}").read_text().replace("\\", "")
        assert not [name for name in (*sites, *cases) if f" {name}" in text or f">{name}" in text]
        assert "site 3" in text
    assert command("report", finished, "--card", "--out", tmp_path, "--site-names")[0] == 0
    named = (tmp_path / "model_card.md").read_text().replace("\\", "")
    assert all(site in named for site in sites)
    assert not [case for case in cases if case in named]


def test_scores_have_the_interval_of_the_mean_over_cases(finished, tmp_path):
    cases = {"p1": 0.5, "p2": 0.7, "p3": 0.9, "p4": 0.3}
    quantile = 3.182446305284263  # of Student's t with 3 degrees of freedom, two-sided 95%

    def change(record):
        entry = record["test"]["sites"]["site_A"]
        entry.update(dice=fmean(cases.values()), cases=cases)
        record["test"]["worst"]["dice"] = {"site": "site_B", "value": 0.1}

    found = section(model_card(changed(finished, tmp_path, change)), "Scores")
    half = quantile * stdev(cases.values()) / math.sqrt(4)
    low, high = f"{0.6 - half:.3f}", f"{min(1, 0.6 + half):.3f}"
    assert f"0.600 \\[{low} to {high}\\]" in found
    assert "worst site: site 2, 0.100" in found
    assert "Dice" in found
    assert "HD95 (mm)" in found


def test_means_that_a_site_sent_without_cases_have_no_interval(finished, tmp_path):
    def change(record):
        record["test"]["sites"]["site_A"] = {"dice": 0.61, "scored_cases": 12, "cases": {}, "unit": "mm"}

    card = model_card(changed(finished, tmp_path, change))
    line = next(line for line in section(card, "Scores").splitlines() if line.startswith("| site 1"))
    assert "0.610 |" in line
    assert "[" not in line
    assert "| site 1 |" in section(card, "Training data")
    assert "| 12 |" in section(card, "Training data")


def test_a_site_without_outlines_counts_no_scored_case_and_the_configuration_has_its_hash(finished, tmp_path):
    def change(record):
        entry = record["test"]["sites"]["site_A"]
        entry.update(dict.fromkeys(record["test"]["mean"]), cases=dict.fromkeys(entry["cases"]))

    run = changed(finished, tmp_path, change)
    card = model_card(run)
    (line,) = [x for x in section(card, "Training data").splitlines() if x.startswith("| site 1 |")]
    assert line.rstrip(" |").endswith("–")
    assert job_hash(run.config.to_dict()) in section(card, "Identity")


def test_the_card_has_the_date_of_the_run_and_its_job(finished, tmp_path):
    run = changed(finished, tmp_path, lambda record: record.update(job="4f3c-9"))
    assert datetime.fromisoformat(run.record["date"]).utcoffset() == timedelta(0)
    rows = [line.split() for line in section(model_card(run), "Identity").replace("\\", "").splitlines()]
    assert ["|", "job", "|", "4f3c-9", "|"] in rows
    assert ["|", "date", "|", run.record["date"], "|"] in rows


def test_why_a_site_has_no_score_is_said_without_its_name(finished, tmp_path):
    def change(record):
        record["test"]["sites"]["site_A"] = {"dice": None, "cases": {}, "note": "fewer than 10 patients"}
        record["unvalidated"] = {"site_B": "site site_B: scores of 100 models have left"}

    found = section(model_card(changed(finished, tmp_path, change)), "Scores")
    assert "site 1, no score: fewer than 10 patients." in found
    assert "site 2, no say in the choice: scores of 100 models have left." in found


def test_what_is_not_known_is_said(finished, tmp_path):
    found = section(model_card(FinishedRun.open(finished)), "Not tested")
    assert "only site 3 was tested" in found
    assert "Fewer than ten test cases: site 1, site 2, site 3" in found
    levels = FinishedRun.open(finished).record["spacing"].values()  # of every run, with and without a plan
    low, high = (ends(found[key] for found in levels) for ends, key in ((min, "low"), (max, "high")))
    assert f"{low[0]:.3g} to {high[0]:.3g}, " in found

    def change(record):
        record["test"]["unseen"], record["unseen"] = {}, []

    assert "none was tested" in section(model_card(changed(finished, tmp_path, change)), "Not tested")


def test_privacy_is_what_each_site_has_spent(finished, tmp_path):
    assert "No site added noise" in section(model_card(FinishedRun.open(finished)), "Privacy")

    def change(record):
        record["rounds"][-1]["sites"]["site_B"].update({"privacy/epsilon": 2.345, "privacy/delta": 1e-5})

    found = section(model_card(changed(finished, tmp_path, change)), "Privacy")
    assert "| site 2 | 2.35 | 1.0e-05 | statistics alone |" in found
    assert "weights of the model were sent without noise" in found
    assert "Without noise: site 1. Nothing bounds" in found


def test_names_of_a_site_are_text_in_both_forms(finished, tmp_path):
    def change(record):
        record["config"]["classes"] = ["background", "<img src=x onerror=alert(1)> | `a`"]

    card = model_card(changed(finished, tmp_path, change))
    from xml.etree import ElementTree

    assert "<img" not in ElementTree.tostring(card.html(), encoding="unicode", method="html")
    assert "\\<img" in card.markdown()


def test_patients_studies_and_edges_are_those_of_each_site(finished):
    found = section(model_card(FinishedRun.open(finished)), "Training data")
    record = json.loads((finished / "results.json").read_text())
    for number, (site, samples) in enumerate(sorted(record["sites"].items()), start=1):
        told, edges = record["counts"][site], record["spacing"][site]["median"]
        counts = f"{told['patients']} | {told['studies']} | {samples}"
        assert f"| site {number} | {counts} | {' x '.join(f'{edge:.3g}' for edge in edges)} |" in found
