"""Folds, seeds and held-out sites that make one row, and patients that make one pair."""

import csv
import io
import itertools
import json
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from results import content

from medfedaug.analysis import metric_table, summary_table
from medfedaug.errors import ConfigError, DataError
from medfedaug.metrics.significance import detectable_difference
from medfedaug.research.comparison import patient_table
from medfedaug.research.comparison.paired_tests import sign_flip_test
from medfedaug.runs.load_results import find_runs, load_run


def test_folds_of_a_seed_are_pooled_so_that_every_patient_counts_once(fold):
    first = fold({"DU": {"a": 0.2, "b": 0.4}, "HT": {"x": 0.9}}, 0, unseen={"EZ": {"e": 0.3}})
    second = fold({"DU": {"c": 0.9}, "HT": {"y": 0.5, "z": None}}, 1, unseen={"EZ": {"e": 0.5}})
    (row,) = summary_table([second, first]).rows
    assert (row.label, row.seeds, row.folds) == ("fedavg", (0,), 2)
    assert row.sites["DU"].values == pytest.approx((0.5,))  # not 0.6, the mean of the folds' means
    assert row.sites["HT"].values == pytest.approx((0.7,))
    assert row.sites["EZ"].values == pytest.approx((0.4,))
    assert row.mean.values == pytest.approx((0.6,))
    table = summary_table([first, second])
    assert table.body[0][-1] == "1 × 2 folds"
    assert "DU 3, EZ 1, HT 3" in table.notes[1]
    assert table.records[0]["folds"] == 2


def test_a_patient_that_two_folds_test_is_refused(fold):
    runs = [fold({"DU": {"a": 0.2}}, 0), fold({"DU": {"a": 0.3}}, 1)]
    with pytest.raises(ConfigError, match="both test case a of site DU"):
        summary_table(runs)
    with pytest.raises(ConfigError, match="same seed 0, fold 0"):
        summary_table([runs[0], fold({"DU": {"b": 0.3}}, 0)])


def test_a_seed_that_lacks_folds_is_left_out_and_named(fold):
    runs = [fold({"DU": {str(k): 0.5 + 0.1 * k}}, k) for k in range(2)] + [
        fold({"DU": {"0": 0.9}}, 0, seed=1)
    ]
    table = summary_table(runs)
    assert table.rows[0].seeds == (0,)
    assert table.rows[0].mean.values == pytest.approx((0.55,))
    assert "seed 1, has 1 of 2 folds" in table.notes[-1]


def test_seeds_that_lack_other_sites_have_no_mean(without):
    """Seed 0 left out only the site with the best score, seed 1 only the one with the worst."""
    runs = [
        without(left_out, {other: {"a": 0.5}}, {left_out: {"b": score}}, methods=methods, seed=seed)
        for methods in (("fedavg",), ("fedrdn",))
        for seed, left_out, other, score in ((0, "CS", "DU", 0.9), (1, "DU", "CS", 0.2))
    ]
    table = summary_table(runs)
    for row in table.rows:
        assert (row.seeds, row.mean.mean) == ((0, 1), None)
        assert (row.sites["CS"].values, row.sites["DU"].values) == ((0.9,), (0.2,))
    assert table.rows[1].difference is None
    assert "fedavg, seed 0, has 1 of 2 held-out sites and no mean." in table.notes
    (fedavg, _) = metric_table(runs).rows
    assert (fedavg.mean.mean, fedavg.worst, fedavg.spread) == (None, "", None)
    # A seed that has both is a whole one, and stands alone.
    both = without("DU", {"CS": {"a": 0.5}}, {"DU": {"b": 0.3}})
    first = summary_table([*runs[:2], both]).rows[0]
    assert (first.seeds, first.mean.values) == ((0,), (pytest.approx(0.6),))


def test_patients_are_paired_over_folds_and_seeds(fold):
    """Two seeds, two folds: a patient is one pair, its score the mean over the common seeds."""
    runs, expected = [], []
    gains = [0.05, 0.10, -0.02, 0.04, 0.03, 0.06, 0.01, 0.02]
    for seed, fold_ in itertools.product(range(2), range(2)):
        mine = range(4 * fold_, 4 * fold_ + 4)
        plain = {f"p{i}": 0.4 + 0.02 * i + 0.1 * seed for i in mine}
        better = {f"p{i}": plain[f"p{i}"] + gains[i] * (1 + seed) for i in mine}
        runs.append(fold({"DU": plain}, fold_, seed=seed, unseen={"EZ": {"e": 0.5}}))
        runs.append(fold({"DU": better}, fold_, seed=seed, methods=("fedrdn",), unseen={"EZ": {"e": 0.6}}))
    # A third seed of FedRDN has no partner, and one patient more that FedAvg could not score.
    runs.append(fold({"DU": {"p0": 0.0}}, 0, seed=2, methods=("fedrdn",)))
    expected = [1.5 * gain for gain in gains]
    table = patient_table(runs)
    (row,) = table.rows
    assert (row.label, row.where, row.run_seeds, row.patients.patients) == ("fedrdn", "training sites", 2, 8)
    assert row.patients.difference == pytest.approx(fmean(expected))
    test = row.patients
    assert (test.p, test.low, test.high) == pytest.approx(sign_flip_test(expected), abs=1e-12)
    assert row.patients.detectable == pytest.approx(detectable_difference(stdev(expected), 8))
    assert "1 of the unseen sites' patients in common with fedavg (fedrdn)" in table.notes[-1]
    assert "7 / 1" in table.markdown()
    (record,) = csv.DictReader(io.StringIO(table.csv()))
    assert float(record["difference"]) == pytest.approx(fmean(expected), abs=1e-15)


def test_sites_left_out_in_turn_over_folds_and_seeds_by_hand(without):
    """Three sites, two folds, three seeds: a site's score is that of its patients by models without it."""
    names, gain = ("CS", "DU", "HT"), {"CS": 0.01, "DU": -0.02, "HT": 0.07}
    runs, plain, better = [], {}, {}
    for seed, number, left_out in itertools.product(range(3), (1, 2), names):
        mine = {site: [f"{site}{number}{k}" for k in range(2 if site == "CS" else 1)] for site in names}
        score = {c: 0.3 + 0.1 * number + 0.02 * seed + 0.01 * k for k, c in enumerate(mine[left_out])}
        raised = {case: value + gain[left_out] * (1 + seed) for case, value in score.items()}
        elsewhere = {site: dict.fromkeys(mine[site], 0.9) for site in names if site != left_out}
        plain.setdefault((seed, left_out), {}).update(score)
        better.setdefault((seed, left_out), {}).update(raised)
        for methods, found in ((("fedavg",), score), (("fedrdn",), raised)):
            unseen = {left_out: found, "EZ": {"e": 0.1 * number}}
            runs.append(without(left_out, elsewhere, unseen, number, methods=methods, seed=seed))
    table = summary_table(runs[::-1])
    fedavg, fedrdn = table.rows
    assert table.sites == names
    assert table.unseen == ("EZ",)
    assert (fedavg.label, fedavg.seeds, fedavg.folds, fedavg.held_out) == ("fedavg", (0, 1, 2), 2, 3)
    assert table.body[0][table.header.index("seeds")] == "3 × 2 folds × 3 sites"
    for row, scores in ((fedavg, plain), (fedrdn, better)):
        for site in names:
            expected = [fmean(scores[seed, site].values()) for seed in range(3)]
            assert row.sites[site].values == pytest.approx(expected)
        means = [fmean(fmean(scores[seed, site].values()) for site in names) for seed in range(3)]
        assert row.mean.values == pytest.approx(means)
        assert row.sites["EZ"].values == pytest.approx([0.15] * 3)
    gains = [fmean(gain.values()) * (1 + seed) for seed in range(3)]
    assert fedrdn.test.difference == pytest.approx(fmean(gains))
    assert table.notes[0].startswith("Dice of each site when it was left out of training")
    pairs = patient_table(runs)
    (row,) = pairs.rows
    differences = [2 * gain[site] for site in names for _ in plain[0, site]]
    assert (row.where, row.run_seeds, row.patients.patients) == ("sites left out", 3, 8)
    assert row.patients.difference == pytest.approx(fmean(differences))
    test = row.patients
    assert (test.p, test.low, test.high) == pytest.approx(sign_flip_test(differences), abs=1e-12)
    # A run less, and its seed is named and left out.
    short = summary_table(runs[:-1])
    assert short.rows[1].seeds == (0, 1)
    assert "fedrdn, seed 2, has 5 of 6 folds and held-out sites and is left out." in short.notes


def test_a_site_left_out_with_all_its_patients_is_tested_by_every_fold(without):
    runs = []
    for number, left_out in itertools.product((1, 2), ("CS", "DU")):
        other = "DU" if left_out == "CS" else "CS"
        run = without(left_out, {other: {"a": 0.9}}, {left_out: {"b": 0.1 * number, "c": 0.5}}, number)
        runs.append(replace(run, options={**run.options, "unseen": left_out}))
    (row,) = summary_table(runs).rows
    assert row.sites["CS"].values == pytest.approx((fmean([0.15, 0.5]),))
    assert row.mean.values == pytest.approx((0.325,))
    with pytest.raises(ConfigError, match="both test case b of site CS"):
        summary_table([replace(run, options={**run.options, "unseen": ""}) for run in runs])


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("b/seed-0", "a/seed-1", "a/.moving"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "results.json").write_text(json.dumps(content()))
    found = find_runs([tmp_path / "runs", tmp_path / "runs/a/seed-1"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["runs/a/seed-1", "runs/b/seed-0"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: holds no finished run"):
        find_runs([tmp_path / "empty"])


def test_patients_are_not_paired_across_other_settings_or_sites(fold):
    scores = {f"p{i}": 0.1 * i for i in range(7)}
    plain = fold({"DU": scores}, 0)
    assert not patient_table([plain]).rows
    assert not patient_table([plain, fold({"DU": scores}, 0, methods=("fedrdn",), batch_size=2)]).rows
    assert not patient_table([plain, fold({"HT": scores}, 0, methods=("fedrdn",))]).rows


def test_a_site_that_could_not_be_tested_is_named_and_its_run_not_compared(write):
    runs = []
    for seed in range(3):
        runs.append(load_run(write(seed=seed, scores={"DU": 0.5, "HT": 0.7 + 0.01 * seed})))
        data = content(methods=("fedfa",), seed=seed, scores={"DU": 0.6, "HT": 0.8})
        if seed == 1:
            del data["test"]["sites"]["HT"]
            data["test"]["mean"]["dice"] = 0.6
            data["test"]["missing"] = {"HT": "site HT: no answer in time", "EZ": "gone"}
            data["sites"] = {"DU": 5, "HT": 5}
            data["left_out"] = {"CS": "site CS: no data"}
        runs.append(load_run(write(data)))
    assert runs[3].sites == {"DU": 0.6, "HT": None}
    assert runs[3].untested["EZ"] == "gone"
    table = summary_table(runs)
    fedfa = table.rows[1]
    assert fedfa.mean.values == (0.7, 0.7)
    assert fedfa.sites["DU"].values == (0.6, 0.6, 0.6)
    assert fedfa.test is None  # two seeds are left
    assert "fedfa, seed 1, trained without CS." in table.notes
    assert "fedfa, seed 1: HT could not be tested; it does not enter the mean." in table.notes


def test_means_are_compared_over_the_sites_that_both_methods_have_a_score_of(write):
    """HD95 of a site where nothing was found is infinite, and enters no mean."""
    runs = []
    for seed in range(3):
        found = {"DU": 10.0, "EZ": 40.0, "HT": 20.0 + seed}
        runs.append(load_run(write(seed=seed, metric="hd95", scores={**found, "EZ": None})))
        runs.append(load_run(write(methods=("fedfa",), seed=seed, metric="hd95", scores=found)))
    table = summary_table(runs)
    fedavg, fedfa = table.rows
    assert fedfa.sites["DU"].values == fedavg.sites["DU"].values
    # The same scores wherever both have one: no difference, although the means over their sites differ.
    assert fedfa.mean.values[0] - fedavg.mean.values[0] > 5
    assert (fedfa.difference, fedfa.test) == (0.0, None)  # equal in every seed: nothing to be tested
    assert (
        "fedavg, seed 0, 1, 2: no score at EZ; its mean is over the other sites, and a difference to fedavg "
        "over the sites that both have a score of." in table.notes
    )
    assert not any("no score" in note for note in summary_table(runs[1::2]).notes)
