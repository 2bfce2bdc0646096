"""Every metric in one table, and a comparison by any of them, on runs made for it."""

import csv
import json
import random
from statistics import fmean, pstdev, stdev

import pytest
from results import Page, content

from medfedaug.analysis import metric_table, summary_table
from medfedaug.metrics.registry import over_sites
from medfedaug.research.comparison import patient_table
from medfedaug.runs.load_results import load_run


def site_entry(scores, unit, missed):
    """A site's entry in `test`: scores by metric and class, of one case."""
    means = {name: fmean(by_class.values()) for name, by_class in scores.items()}
    labels = next(iter(scores.values()))
    return {
        **means,
        "missed": missed,
        "unit": unit,
        "classes": {label: {name: scores[name][label] for name in scores} for label in labels},
        "cases": {"p1": means["dice"]},
        "case_metrics": {"hd95": {"p1": means["hd95"]}},
    }


@pytest.fixture
def with_metrics(write):
    """Write a run with Dice and HD95 of two classes by site: `with_metrics({"DU": ((0.5, 0.7), (9, 3))})`."""

    def make(sites, missed=1, unit="mm", **arguments):
        data = content(**arguments)
        entries = {
            site: site_entry(
                {
                    "dice": dict(zip(("edema", "core"), dice, strict=True)),
                    "hd95": dict(zip(("edema", "core"), hd95, strict=True)),
                },
                unit,
                missed,
            )
            for site, (dice, hd95) in sites.items()
        }
        data["test"] = {"sites": entries, "unseen": {}, **over_sites(entries, ("dice", "hd95"))}
        return write(data)

    return make


SEEDS = [
    {"DU": ((0.5, 0.7), (9.0, 3.0)), "HT": ((0.6, 0.9), (4.0, 5.0)), "EZ": ((0.8, 0.4), (2.0, 2.5))},
    {"DU": ((0.4, 0.6), (8.0, 4.0)), "HT": ((0.7, 0.9), (11.0, 6.0)), "EZ": ((0.9, 0.5), (1.0, 2.5))},
]


def test_the_table_has_means_classes_worst_site_and_spread(with_metrics):
    runs = [load_run(with_metrics(sites, seed=seed)) for seed, sites in enumerate(SEEDS)]
    rows = {row.metric: row for row in metric_table(runs).rows}
    assert list(rows) == ["dice", "hd95"]
    for index, (name, worst) in enumerate((("dice", min), ("hd95", max))):
        by_site = {site: fmean(fmean(seed[site][index]) for seed in SEEDS) for site in SEEDS[0]}
        means = [fmean(fmean(scores[index]) for scores in seed.values()) for seed in SEEDS]
        row = rows[name]
        assert row.mean.mean == pytest.approx(fmean(means))
        assert row.mean.std == pytest.approx(stdev(means))
        assert row.worst == worst(by_site, key=by_site.get)
        assert row.worst_score == pytest.approx(worst(by_site.values()))
        assert row.spread == pytest.approx(pstdev(by_site.values()))
        assert row.gap == pytest.approx(max(by_site.values()) - min(by_site.values()))
        for k, label in enumerate(("edema", "core")):
            expected = fmean(fmean(scores[index][k] for scores in seed.values()) for seed in SEEDS)
            assert row.classes[label].mean == pytest.approx(expected)
    assert (rows["dice"].worst, rows["hd95"].worst) == ("DU", "HT")
    assert (rows["dice"].missed, rows["hd95"].missed) == (None, 3.0)
    assert rows["hd95"].title == "HD95 in mm"


def test_a_run_by_another_metric_keeps_its_validation_and_its_cases(with_metrics):
    folder = with_metrics(SEEDS[0])
    plain, run = load_run(folder), load_run(folder, "hd95")
    assert run.sites == {"DU": 6.0, "HT": 4.5, "EZ": 2.25}
    assert run.mean == pytest.approx(4.25)
    assert run.case_scores["DU"] == {"p1": 6.0}
    assert run.validation() == plain.validation() != [None] * 3
    assert run.scored_by("dice").sites == plain.sites
    table = summary_table([run])
    assert "HD95 in mm (lower is better)" in table.notes[0]
    assert table.rows[0].sites["DU"].values == (6.0,)


def test_lower_is_better_where_it_is(run, fold, tmp_path):
    """Twenty patients, five seeds, and a method whose distances are shorter for every one."""
    rng, folders = random.Random(0), []
    for seed in range(5):
        plain = {f"p{i}": 9 + 0.1 * i + 0.05 * seed for i in range(20)}
        for methods, gain in ((("fedavg",), 0.0), (("fedrdn",), 1.0)):
            distances = {name: value - rng.gauss(gain, 0.1) for name, value in plain.items()}
            folder = fold({"DU": dict.fromkeys(plain, 0.5)}, 0, seed=seed, methods=methods).path.parent
            data = json.loads((folder / "results.json").read_text())
            entry = data["test"]["sites"]["DU"]
            entry |= {"hd95": fmean(distances.values()), "unit": "mm", "case_metrics": {"hd95": distances}}
            data["test"]["mean"]["hd95"] = entry["hd95"]
            (folder / "results.json").write_text(json.dumps(data))
            folders.append(folder)
    arguments = (*folders, "--metric", "hd95", "--out", tmp_path / "p.html", "--tables", tmp_path / "t")
    run.ok("report", *arguments)
    (row,) = patient_table([load_run(folder, "hd95") for folder in folders]).rows
    assert row.patients.difference == pytest.approx(-1.0, abs=0.1)
    assert (row.patients.better, row.patients.worse) == (20, 0)
    assert str(row.verdict) == "not confirmed (rare losses could undo the gain)"  # shorter is a gain
    with open(tmp_path / "t/patients.csv") as file:
        (record,) = csv.DictReader(file)
    assert record["verdict"] == str(row.verdict)
    page = Page((tmp_path / "p.html").read_text())
    assert "HD95 in mm on the test cases" in page.text
    assert "Dice on the validation cases" in page.text
    assert "HD95 against fedavg on the same 20 patients" in page.text


def test_millimetres_and_pixels_have_no_common_worst_site(with_metrics, write):
    data = json.loads((with_metrics(SEEDS[0]) / "results.json").read_text())
    data["test"]["sites"]["HT"]["unit"] = "px"
    (row,) = [row for row in metric_table([load_run(write(data))]).rows if row.metric == "hd95"]
    assert (row.worst, row.spread, row.title) == ("", None, "HD95")
    assert (row.mean.mean, row.classes) == (None, {})
