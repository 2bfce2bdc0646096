"""Runs whose models found nothing: headline, terminal, tables and page say so, and compare nothing."""

import pytest
import torch
from results import Page

from medfedaug.analysis import summary_table, write_report
from medfedaug.analysis.report import answer
from medfedaug.metrics.registry import nothing_learned_in
from medfedaug.metrics.segmentation import LabelMapScores
from medfedaug.research.comparison import patient_table
from medfedaug.runs.load_results import load_run


def runs_of(fold, score, methods=("fedavg", "fedrdn")):
    """Five seeds of 24 patients at two sites, whose scores ``score(seed, patient)`` gives by method."""
    return [
        fold(
            {site: {f"{site}{p}": score(method, seed, p) for p in range(12)} for site in ("DU", "HT")},
            0,
            seed=seed,
            methods=(method,),
        )
        for seed in range(5)
        for method in methods
    ]


def test_nothing_is_compared_where_every_dice_is_0(fold, tmp_path):
    runs = runs_of(fold, lambda *_: 0.0)
    table = summary_table(runs)
    assert answer(table).startswith("Nothing was learned: every test Dice is 0. Likely remedies: ")
    assert not patient_table(runs).rows
    assert all(row.test is None and row.verdict is None and row.difference is None for row in table.rows)
    assert "Nothing was learned: every test Dice is 0. Hence nothing is compared." in " ".join(table.notes)
    page = write_report([run.path.parent for run in runs], tmp_path / "report.html").read_text()
    assert "Nothing was learned: every test Dice is 0." in page
    for word in ("could see", "95% CI", "Paired by", "better", "p = "):
        assert word not in page


def test_nothing_is_compared_with_a_baseline_that_learned_nothing(fold, tmp_path):
    runs = runs_of(fold, lambda method, seed, p: (method == "fedrdn") * (0.5 + 0.01 * p + 0.002 * seed))
    table = summary_table(runs)
    assert table.nothing_learned == ""
    assert all(row.verdict is None and row.difference is None for row in table.rows)
    said = "Train longer: fedavg learned nothing in 3 rounds (every test Dice is 0), and nothing is compared"
    assert answer(table).startswith(said)
    page = Page(write_report([run.path.parent for run in runs], tmp_path / "report.html").read_text())
    assert page.text.index(said) < page.text.index("10 runs")
    assert "Paired by" not in page.text


def test_a_site_at_which_a_method_learned_nothing_is_named(write):
    runs = [
        load_run(write(methods=(method,), scores={"DU": 0.5, "HT": score}))
        for method, score in (("fedavg", 0.0001), ("fedrdn", 0.4))
    ]
    notes = summary_table(runs).notes
    assert [note for note in notes if "learned nothing" in note] == [
        "fedavg learned nothing at HT: Dice 0.000."
    ]


@pytest.mark.parametrize("offset", [0.0, 0.04])
def test_differences_that_do_not_vary_between_seeds_have_no_test(fold, offset):
    """A variation of 0 would make any difference more than chance, and none of them exactly nothing."""
    runs = runs_of(fold, lambda method, seed, p: 0.3 + 0.01 * p + offset * (method == "fedrdn"))
    table = summary_table(runs)
    assert table.rows[1].test is None
    lacking = "no variation between seeds, no variation between patients"
    assert str(table.rows[1].verdict) == f"open: {lacking}"


@pytest.mark.parametrize(
    ("recalls", "nothing"),
    [
        ({"A": (1.0, 0.0, 0.0), "B": (1.0, 0.0, None)}, True),
        ({"A": (1.0, 0.0, 0.0), "B": (0.0, 1.0, 0.0)}, True),  # each site's own model, one class each
        ({"A": (1.0, 0.0, 0.0), "B": (1.0, None, None)}, True),  # of B's one class nothing can be said
        ({"A": (1.0, 0.0, 0.1), "B": (1.0, 0.0, 0.0)}, False),
        ({"A": (1.0, 1.0, 0.0), "B": (1.0, 0.0, 0.0)}, False),
        ({"A": (1.0, None, None), "B": (None, 1.0, None)}, False),
    ],
)
def test_one_class_for_all_images(recalls, nothing):
    sites = {
        site: {"accuracy": 0.4, "classes": {c: {"accuracy": r} for c, r in zip("xyz", found, strict=True)}}
        for site, found in recalls.items()
    }
    assert bool(nothing_learned_in({"sites": sites, "mean": {"accuracy": 0.4}})) is nothing


@pytest.mark.parametrize(
    ("given", "undivided"),
    [
        ([1, 1, 1, 1], True),  # one class for all
        ([2, 2, 1, 2], True),  # no background anywhere
        ([0, 0, 0, 0], True),
        ([0, 0, 0, 2], False),
    ],
)
def test_an_answer_that_draws_no_outline(given, undivided):
    """Of three classes, at a site with a case that is background alone, in which such an answer is right."""
    scores = LabelMapScores(("background", "core", "edema"), 2.0, ["dice"], full=True)
    predicted = torch.tensor(given).reshape(1, 2, 2, 1)
    scores.add("p1", predicted, torch.tensor([0, 1, 2, 2]).reshape(1, 2, 2, 1), None)
    scores.add("p2", predicted, torch.zeros(1, 2, 2, 1, dtype=torch.uint8), None)
    found = scores.result()
    assert found["undivided"] == int(undivided)
    reason = nothing_learned_in({"sites": {"A": found}, "mean": {"dice": found["dice"]}})
    assert bool(reason) is undivided
    assert not nothing_learned_in(
        {"sites": {"A": found, "B": {**found, "dice": 0.4, "undivided": 0}}, "mean": {"dice": 0.3}}
    )
