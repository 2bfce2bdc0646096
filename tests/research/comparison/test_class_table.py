"""Verdicts by class, apart where sites outlined it for training and where they borrow it."""

import csv
import random
from statistics import fmean

import pytest
from results import content

from medfedaug.analysis import summary_table
from medfedaug.analysis.report import write_report
from medfedaug.metrics.registry import over_sites
from medfedaug.research.comparison import patient_table
from medfedaug.research.comparison.class_table import class_table
from medfedaug.runs.load_results import load_run

CLASSES = ("background", "liver", "spleen", "kidney")
LABELLED = {"DU": ["liver", "kidney"], "HT": ["spleen", "kidney"]}
PATIENTS = [f"p{k}" for k in range(24)]
# Of the second method, by class and whether a site has it: it helps classes that are borrowed alone.
GAINS = {("liver", False): 0.2, ("spleen", False): 0.2}


def entry(site: str, gain: bool, draw: random.Random) -> dict:
    by_class = {
        name: {
            patient: min(
                1.0,
                max(
                    0.0,
                    (0.6 if name in LABELLED[site] else 0.3)
                    + gain * GAINS.get((name, name in LABELLED[site]), 0.0)
                    + draw.gauss(0, 0.03),
                ),
            )
            for patient in PATIENTS
        }
        for name in CLASSES[1:]
    }
    cases = {patient: fmean(of[patient] for of in by_class.values()) for patient in PATIENTS}
    return {
        "dice": fmean(cases.values()),
        "cases": cases,
        "classes": {name: {"dice": fmean(of.values())} for name, of in by_class.items()},
        "case_classes": by_class,
    }


@pytest.fixture
def runs(write):
    def make(seeds=5, labelled=LABELLED, cases=True):
        found = []
        for seed in range(seeds):
            for gain, methods in enumerate((("fedavg",), ("condist",))):
                draw = random.Random(100 * seed + gain)
                data = content(methods=methods, seed=seed, classes=list(CLASSES))
                entries = {site: entry(site, bool(gain), draw) for site in LABELLED}
                for one in () if cases else entries.values():
                    del one["case_classes"]
                data["test"] = {"sites": entries, "unseen": {}, **over_sites(entries, ("dice",))}
                found.append(load_run(write({**data, **({"labelled": labelled} if labelled else {})})))
        return found

    return make


def test_a_method_that_helps_borrowed_classes_alone_is_better_there_and_nowhere_else(runs):
    found = class_table(runs())
    by_cell = {(row.name, row.kind): row for row in found.rows if row.label == "condist"}
    assert {cell: row.sites for cell, row in by_cell.items()} == {
        ("liver", "own"): ("DU",),
        ("liver", "borrowed"): ("HT",),
        ("spleen", "own"): ("HT",),
        ("spleen", "borrowed"): ("DU",),
        ("kidney", "own"): ("DU", "HT"),
    }
    # One site has all patients of the cell, by which the verdict is its own.
    assert by_cell["liver", "borrowed"].verdict == "better at HT"
    assert by_cell["spleen", "borrowed"].verdict == "better at DU"
    assert {row.verdict for cell, row in by_cell.items() if cell[1] == "own"} == {"no difference shown"}
    assert by_cell["liver", "borrowed"].comparison.difference == pytest.approx(0.2, abs=0.02)
    assert by_cell["kidney", "own"].comparison.num_patients == 48
    # Of all comparisons of the table, not of each class alone.
    alone = by_cell["liver", "borrowed"].comparison
    assert alone.adjusted > max(alone.seeds.p, alone.crossed.p)


def test_with_few_seeds_or_without_scores_of_cases_every_verdict_is_open(runs):
    for found in (class_table(runs(seeds=2)), class_table(runs(cases=False))):
        assert all(row.verdict.startswith("open") for row in found.rows if row.label == "condist")
    assert "0 of 20" in class_table(runs(cases=False)).rows[-1].verdict


def test_pages_say_which_cells_a_mean_is_of(runs, tmp_path):
    found = runs()
    for one in (summary_table(found), patient_table(found), class_table(found)):
        assert any("DU: liver, kidney; HT: spleen, kidney" in note for note in one.notes)
    write_report(found, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "By class, where sites have outlined different ones" in page
    assert "better at HT" in page


def test_files_have_every_number(runs, tmp_path):
    class_table(runs()).save(tmp_path / "classes")
    rows = list(csv.DictReader((tmp_path / "classes.csv").open()))
    assert len(rows) == 10
    row = next(
        r for r in rows if (r["method"], r["class"], r["annotated"]) == ("condist", "liver", "borrowed")
    )
    assert float(row["low"]) < float(row["difference"]) < float(row["high"])
    assert (row["sites"], row["patients"], row["verdict"]) == ("HT", "24", "better at HT")
