"""Runs whose plans were made of their own sites' fingerprints: one experiment, and what a reader is told."""

import re

import pytest
from results import Page, content

from medfedaug.analysis import summary_table, write_report
from medfedaug.analysis.grouping import experiment
from medfedaug.config.plan import Plan
from medfedaug.errors import DataError
from medfedaug.runs.load_results import load_run


def planned_run(write, spacing, methods=("fedavg",), seed=0, held_out="", fold=0, asked=None):
    """A run whose plan was made of its own sites' fingerprints, as `results.json` has it."""
    sites = {site: 0.1 * k + 0.01 * seed for k, site in enumerate("ABC", 5) if site != held_out}
    holdout = [held_out] if held_out else []
    data = content(methods, seed, sites, unseen={held_out: 0.3} if held_out else None, holdout=holdout)
    settings = data["config"]
    data["planned"] = {
        "asked": {**settings, "planning": {"memory": 8.0, "given": []}, **(asked or {})},
        "reasons": [[f"spacing {spacing}", "the median"]],
        "fingerprints": {},
    }
    data["config"] = {**settings, "plan": Plan(spacing=(1.0, 1.0, spacing)).to_dict(), "batch_size": 4}
    for group in ("sites", "unseen"):
        for site, entry in data["test"][group].items():
            entry["cases"] = {f"{site}{fold}{k}": entry["dice"] for k in range(3)}
    if fold:
        data["data_options"] = {"folds": 3, "fold": fold, "fold_seed": seed}
    return load_run(write(data))


def test_sites_left_out_in_turn_are_one_experiment_though_each_run_has_a_plan_of_its_own(write, tmp_path):
    runs = [
        planned_run(write, spacing, (method,), held_out=site)
        for method in ("fedavg", "fedrdn")
        for site, spacing in zip("ABC", (1.0, 2.0, 1.5), strict=True)
    ]
    table = summary_table(runs)
    assert [(row.label, row.held_out, row.mean.mean) for row in table.rows] == [
        ("fedavg", 3, pytest.approx(0.3)),
        ("fedrdn", 3, pytest.approx(0.3)),
    ]
    assert table.rows[1].difference == pytest.approx(0.0)
    assert not any("plan" in note for note in table.notes)
    text = Page(write_report(runs, tmp_path / "r.html").read_text()).text
    assert '"spacing": [1.0, 1.0, 2.0]' in text.split("Configuration")[-1]
    assert "(seed 0, without B)" in text.split("Configuration")[-1]
    assert 'planning{"memory": 8.0, "given": []}' in re.sub(r"\n", "", text)
    assert "This is the plan of fedavg, seed 0, without A." in text


def test_folds_and_seeds_are_one_experiment_though_each_run_has_a_plan_of_its_own(write):
    runs = [
        planned_run(write, 1 + 0.1 * ((number + seed) % 2), (method,), seed, fold=number)
        for method in ("fedavg", "fedrdn")
        for seed in (0, 1)
        for number in (1, 2, 3)
    ]
    assert [(row.label, row.seeds, row.folds) for row in summary_table(runs).rows] == [
        ("fedavg", (0, 1), 3),
        ("fedrdn", (0, 1), 3),
    ]


def test_another_plan_that_was_asked_for_is_another_experiment(write):
    given = {"planning": {"memory": 8.0, "given": ["batch_size"]}, "batch_size": 2}
    runs = [planned_run(write, 1.0), planned_run(write, 1.0, ("fedrdn",), asked=given)]
    runs += [load_run(write(methods=("fedfa",), scores={"A": 0.5, "B": 0.5, "C": 0.5}))]
    with_same = [run.label for run in runs if experiment(run) == experiment(runs[0])]
    assert with_same == ["fedavg"]
    assert all(row.difference is None for row in summary_table(runs).rows)


def test_a_plan_that_does_not_say_what_was_asked_is_named(write):
    folder = write({**content(), "planned": {"reasons": []}})
    with pytest.raises(DataError, match=r"planned is .*, expected an object with asked"):
        load_run(folder)
