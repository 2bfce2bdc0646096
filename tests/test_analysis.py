import base64
import csv
import io
import itertools
import json
import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest
from rich.console import Console

from medfedaug.analysis import (
    find_runs,
    gamma_by_layer,
    group_runs,
    learning_curves,
    load_run,
    metric_by_bytes,
    paired_t_test,
    patient_table,
    significance,
    summary_table,
    write_report,
)
from medfedaug.analysis.significance import (
    _power,
    bootstrap_interval,
    compare_patients,
    detectable_difference,
    t_quantile,
    t_two_sided,
    wilcoxon_signed_rank,
)
from medfedaug.errors import ConfigError, DataError


def content(
    methods=("fedavg",), seed=0, scores=None, metric="dice", rounds=3, unseen=None, args=None, **config
):
    """A `results.json` with the given test scores and a validation score of round / 10 at the first site."""
    scores = {"DU": 0.5, "HT": 0.7} if scores is None else scores
    known = [value for value in scores.values() if value is not None]
    entries = []
    for r in range(1, rounds + 1):
        entry = {
            "round": r,
            "sites": {
                site: {"train_loss": 1 / r, f"val_{metric}": r / 10 + 0.1 * k, "samples": 5, "seconds": 1.0}
                for k, site in enumerate(scores)
            },
            "bytes_up": 1_000_000,
            "bytes_down": 1_000_000,
            "bytes": {"model": {"up": 1_000_000, "down": 1_000_000}},
            "methods": {},
            "refused": [],
        }
        if "fedfa" in methods:
            entry["methods"]["fedfa"] = {
                "enc1": {"gamma_mean": [0.3, 0.5 + 0.01 * r], "gamma_std": [0.2, 0.6]}
            }
            entry["bytes"]["fedfa"] = {"up": 16_000, "down": 16_000}
        entries.append(entry)
    return {
        "config": {
            "methods": [{"name": name, "args": (args or {}).get(name, {})} for name in methods],
            "seed": seed,
            "rounds": rounds,
            "local_epochs": 1,
            "task": "segmentation",
            **config,
        },
        "input": {"scaling": "each volume", "normalised_by": "fedrdn" if "fedrdn" in methods else None},
        "rounds": entries,
        "selected_round": min(2, rounds),
        "test": {
            "sites": {site: {metric: value, "cases": {"p1": value}} for site, value in scores.items()},
            "unseen": {site: {metric: value, "cases": [value]} for site, value in (unseen or {}).items()},
            "mean": {metric: sum(known) / len(known) if known else None},
        },
        "engine": "inprocess",
        "data": "phantom",
        "seconds": 90.0,
    }


@pytest.fixture
def write(tmp_path):
    def write(data=None, **arguments):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(content(**arguments) if data is None else data))
        return folder

    return write


# ------------------------------------------------------------------ significance


@pytest.mark.parametrize(
    ("df", "t", "p"),
    [
        (1, 12.7062, 0.05),
        (2, 4.30265, 0.05),
        (3, 3.18245, 0.05),
        (4, 2.77645, 0.05),
        (4, 4.60409, 0.01),
        (5, 2.57058, 0.05),
        (9, 3.24984, 0.01),
        (10, 2.22814, 0.05),
        (30, 2.04227, 0.05),
        (120, 1.97993, 0.05),
    ],
)
def test_t_distribution_against_the_printed_tables(df, t, p):
    assert t_two_sided(t, df) == pytest.approx(p, rel=2e-5)
    assert t_two_sided(-t, df) == t_two_sided(t, df)
    assert t_quantile(1 - p, df) == pytest.approx(t, rel=1e-5)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 8, 15])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5])
def test_t_distribution_against_the_integral_of_its_density(df, t):
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    n = 2000
    heights = [scale * (1 + (t * i / n) ** 2 / df) ** (-(df + 1) / 2) for i in range(n + 1)]
    simpson = t / n / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
    assert t_two_sided(t, df) == pytest.approx(1 - 2 * simpson, abs=1e-10)


def test_paired_t_test_on_students_own_data():
    # "Student" 1908, hours of sleep; t = -4.0621, df = 9.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    test = paired_t_test(first, second)
    assert test.p == pytest.approx(0.002833, abs=5e-7)
    assert (test.difference, test.low, test.high) == pytest.approx((-1.58, -2.4598858, -0.7001142), abs=1e-7)
    assert test.pairs == 10


def test_paired_t_test_at_its_edges():
    assert paired_t_test([0.5, 0.6], [0.5, 0.6]).p == 1
    assert paired_t_test([1.0, 2.0], [0.5, 1.5]).p == 0
    assert t_two_sided(math.inf, 4) == pytest.approx(0, abs=1e-15)
    with pytest.raises(ValueError, match="two or more pairs"):
        paired_t_test([1.0], [2.0])
    with pytest.raises(ValueError, match="two or more pairs"):
        paired_t_test([1.0, 2.0], [2.0])
    with pytest.raises(ValueError, match="df"):
        t_two_sided(1.0, 0)


@pytest.mark.parametrize(
    ("noncentrality", "df", "power"),
    [
        (1 / math.sqrt(2 / 20), 38, 0.8689528),  # R: power.t.test(n = 20, delta = 1, sd = 1)
        (
            1 / math.sqrt(2 / 22.02110),
            42,
            0.90,
        ),  # R: power.t.test(delta = 1, power = .90), df to the next whole
        (0.0, 7, 0.05),
    ],
)
def test_power_against_printed_values(noncentrality, df, power):
    assert _power(noncentrality, t_quantile(0.95, df), df) == pytest.approx(power, abs=2e-4)


def test_detectable_difference_is_found_four_times_in_five():
    rng = np.random.default_rng(0)
    n, spread = 6, 0.07
    shift = detectable_difference(spread, n)
    samples = rng.normal(shift, spread, (200_000, n))
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / math.sqrt(n))
    found = np.mean(np.abs(t) > t_quantile(0.95, n - 1))
    assert found == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / len(t)))
    assert detectable_difference(2 * spread, n) == pytest.approx(2 * shift, rel=1e-8)
    assert detectable_difference(spread, n, power=0.9) > shift > detectable_difference(spread, n + 1)
    assert detectable_difference(1, 100_000) * math.sqrt(100_000) == pytest.approx(2.8016, rel=1e-4)  # z + z
    assert detectable_difference(0.0, n) == 0
    for bad in ({"pairs": 1}, {"pairs": 5, "power": 1.0}, {"pairs": 5, "power": 0.01}):
        with pytest.raises(ValueError, match="pairs"):
            detectable_difference(1.0, **bad)


def test_wilcoxon_against_all_assignments_of_signs():
    differences = [0.3, -0.1, 0.2, 0.2, -0.2, 0.0, 0.7, 0.3 + 1e-15, -0.05]
    known = [d for d in differences if d]
    sizes = sorted(round(abs(d), 9) for d in known)
    ranks = [
        sum(i for i, s in enumerate(sizes, 1) if s == round(abs(d), 9)) / sizes.count(round(abs(d), 9))
        for d in known
    ]
    observed = sum(r for r, d in zip(ranks, known, strict=True) if d > 0)
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign)
        for signs in itertools.product((0, 1), repeat=len(ranks))
    ]
    tails = sum(s >= observed for s in sums), sum(s <= observed for s in sums)
    assert wilcoxon_signed_rank(differences) == pytest.approx(2 * min(tails) / len(sums), abs=1e-15)
    assert wilcoxon_signed_rank([-d for d in differences]) == wilcoxon_signed_rank(differences)


@pytest.mark.parametrize(("n", "smaller"), [(6, 0), (8, 3), (10, 8), (20, 52), (25, 89)])
def test_wilcoxon_against_the_printed_critical_values(n, smaller):
    """Two-sided 5% points: the given rank sum is significant, the next is not."""

    def p(rank_sum):
        negative, left = set(), rank_sum
        for rank in range(n, 0, -1):
            if rank <= left:
                negative.add(rank)
                left -= rank
        return wilcoxon_signed_rank([-r if r in negative else r for r in range(1, n + 1)])

    assert p(smaller) <= 0.05 < p(smaller + 1)


def test_wilcoxon_of_many_differences_joins_its_exact_values(monkeypatch):
    rng = np.random.default_rng(3)
    differences = np.round(rng.normal(0.1, 1, 250), 1)  # with ties
    exact = wilcoxon_signed_rank(differences)
    monkeypatch.setattr(significance, "_EXACT_RANKS", 10)
    assert wilcoxon_signed_rank(differences) == pytest.approx(exact, rel=0.02)
    assert wilcoxon_signed_rank([0.0, 0.0]) == 1


def test_bootstrap_interval_is_bca(monkeypatch):
    monkeypatch.setattr(significance, "_RESAMPLES", 200_000)
    # Reference: the definition with loops, the acceleration by the jackknife, on resamples of its own.
    values = [0.0123, 0.1071, 0.1219, 0.2347, 0.3113, 0.9297, 1.5441, 0.0519, 0.4177, 0.3831]
    n, mean, normal = len(values), fmean(values), NormalDist()
    rng = random.Random(4)
    means = sorted(fmean(rng.choices(values, k=n)) for _ in range(100_000))
    bias = normal.inv_cdf(sum(m < mean for m in means) / len(means))
    leaving_out = [fmean(values[:i] + values[i + 1 :]) for i in range(n)]
    centre = fmean(leaving_out)
    cubes, squares = (sum((centre - m) ** k for m in leaving_out) for k in (3, 2))
    acceleration = cubes / (6 * squares**1.5)
    expected = []
    for z in (-1.959964, 1.959964):
        share = normal.cdf(bias + (bias + z) / (1 - acceleration * (bias + z)))
        expected.append(means[int(share * len(means))])
    low, high = bootstrap_interval(values)
    assert (low, high) == pytest.approx(expected, abs=0.01)
    assert high > means[int(0.975 * len(means))] + 0.03  # which the plain percentiles are not
    assert high - mean > mean - low  # the long tail of the sample is above
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval([-v for v in values]) == pytest.approx((-high, -low), abs=0.01)


def test_bootstrap_interval_at_its_edges():
    assert bootstrap_interval([0.1, 0.1, 0.1]) == pytest.approx((0.1, 0.1), abs=1e-15)
    values = np.random.default_rng(0).normal(0, 1, 4000)
    half = 1.96 * values.std() / math.sqrt(4000)
    expected = (values.mean() - half, values.mean() + half)
    assert bootstrap_interval(values) == pytest.approx(expected, abs=0.002)
    with pytest.raises(ValueError, match="two or more"):
        bootstrap_interval([1.0])


def test_compare_patients_puts_the_numbers_together():
    ours, theirs = [0.7, 0.8, 0.6, 0.9, 0.5], [0.6, 0.5, 0.7, 0.5, 0.5]
    test = compare_patients(ours, theirs)
    assert test.difference == pytest.approx(0.14)
    assert (test.patients, test.better, test.worse) == (5, 3, 1)
    # Ranks 1.5 (+), 3 (+), 1.5 (-), 4 (+): of 16 assignments 3 have a negative sum of 1.5 or less.
    assert test.p == 6 / 16
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    assert (test.low, test.high) == bootstrap_interval(differences)
    assert test.detectable == pytest.approx(detectable_difference(stdev(differences), 5))
    with pytest.raises(ValueError, match="two or more pairs"):
        compare_patients([1.0], [1.0])


# ------------------------------------------------------------------ reading


def test_load_run_takes_folder_or_file(write):
    folder = write(methods=("fedavg", "fedrdn", "fedfa"), seed=4, unseen={"EZ": 0.6})
    run = load_run(folder)
    assert run == load_run(folder / "results.json")
    assert (run.label, run.seed, run.metric, run.selected_round) == ("fedrdn + fedfa", 4, "dice", 2)
    assert (run.sites, run.unseen, run.mean) == ({"DU": 0.5, "HT": 0.7}, {"EZ": 0.6}, 0.6)
    assert run.cases == {"DU": 1, "HT": 1, "EZ": 1}
    assert run.validation("DU") == pytest.approx([0.1, 0.2, 0.3])
    assert run.validation() == pytest.approx([0.15, 0.25, 0.35])
    assert run.gamma()["enc1"]["gamma_mean"] == [(1, 0.3, 0.51), (2, 0.3, 0.52), (3, 0.3, 0.53)]


def test_the_metric_comes_from_the_file(write):
    run = load_run(write(metric="accuracy"))
    assert run.metric == "accuracy"
    assert run.validation("DU") == pytest.approx([0.1, 0.2, 0.3])
    assert "Accuracy" in summary_table([run]).notes[0]


def _without(*path):
    data = content()
    node = data
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return data


def _with(value, *path):
    data = content()
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "the content is not an object"),
        (_without("config"), "config is missing"),
        (_without("config", "seed"), "config.seed is missing"),
        (_with(["fedavg"], "config", "methods"), "an entry of config.methods is not an object"),
        (_with(True, "config", "seed"), "config.seed is not a whole number"),
        (_without("rounds", 1, "sites"), r"rounds\[1\].sites is missing"),
        (_with(3, "rounds", 0, "sites", "DU"), r"rounds\[0\].sites.DU is not an object"),
        (_with("NaN", "rounds", 0, "refused"), r"rounds\[0\].refused is not a list"),
        (_with(["DU"], "rounds", 0, "missing"), r"an entry of rounds\[0\].missing is not an object"),
        (_with(["DU"], "left_out"), "left_out is not an object"),
        (_with(["DU"], "test", "missing"), "test.missing is not an object"),
        (_with("x", "test", "sites", "DU", "cases", "p1"), "test.sites.DU.cases.p1 is not a number"),
        (_with({}, "test", "mean"), "test.mean names no metric"),
        (_with({}, "test", "sites"), "test.sites names no site"),
        (_with("high", "test", "sites", "DU", "dice"), "test.sites.DU.dice is not a number"),
        (_with(None, "selected_round"), "selected_round is not a whole number"),
    ],
)
def test_a_malformed_file_is_told_in_one_line(write, data, problem):
    folder = write(data)
    with pytest.raises(DataError, match=problem) as error:
        load_run(folder)
    assert str(folder / "results.json") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing.results\.json.*not there"):
        load_run(tmp_path / "nothing")
    (tmp_path / "results.json").write_text('{"config": ')
    with pytest.raises(DataError, match=r"results\.json: is not JSON") as error:
        load_run(tmp_path)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------ tables


@pytest.fixture
def seeds(write):
    """FedAvg and FedRDN with three seeds; the differences of the means are 0.01, 0.03, 0.02."""
    runs = []
    for seed, (base, gain) in enumerate([(0.50, 0.01), (0.54, 0.03), (0.52, 0.02)]):
        plain = {"DU": base - 0.1, "HT": base + 0.1}
        better = {"DU": base - 0.1 + gain, "HT": base + 0.1 + gain}
        runs.append(load_run(write(methods=("fedrdn",), seed=seed, scores=better, unseen={"EZ": 0.9})))
        runs.append(load_run(write(methods=("fedavg",), seed=seed, scores=plain, unseen={"EZ": 0.9})))
    return runs


def test_table_against_numbers_by_hand(seeds):
    table = summary_table(seeds)
    assert [row.label for row in table.rows] == ["fedavg", "fedrdn"]
    fedavg, fedrdn = table.rows
    assert (fedavg.sites["DU"].mean, fedavg.sites["DU"].std) == pytest.approx((0.42, 0.02))
    assert (fedrdn.mean.mean, fedrdn.mean.std) == pytest.approx((0.54, 0.03))
    assert fedrdn.sites["EZ"].values == (0.9, 0.9, 0.9)
    assert fedavg.test is None
    # t = 0.02 / (0.01 / sqrt(3)) = 2 sqrt(3); for two degrees of freedom p = 1 - t / sqrt(2 + t^2).
    assert fedrdn.test.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert fedrdn.test.difference == pytest.approx(0.02)
    # 3.264 standard errors: R, power.t.test(n = 3, power = .8, type = "paired").
    assert fedrdn.test.detectable == pytest.approx(3.26404 * 0.01, rel=1e-4)
    assert fedrdn.test.high - 0.02 == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-6)


def test_markdown(seeds):
    lines = summary_table(seeds).markdown().splitlines()
    assert lines[0] == "| method | DU | HT | EZ † | mean | seeds | Δ to fedavg [95% CI] | p | could see |"
    assert lines[1] == "| --- |" + " ---: |" * 8
    assert (
        lines[2] == "| fedavg | 0.420 ± 0.020 | 0.620 ± 0.020 | 0.900 ± 0.000 | 0.520 ± 0.020 | 3 |  |  |  |"
    )
    assert lines[3].endswith("| 0.540 ± 0.030 | 3 | +0.020 [-0.005, +0.045] | 0.074 | 0.033 |")


def test_csv_has_full_precision(seeds):
    fedavg, fedrdn = csv.DictReader(io.StringIO(summary_table(seeds).csv()))
    assert fedavg["seeds"] == "0 1 2"
    assert float(fedrdn["mean"]) == pytest.approx(0.54, abs=1e-15)
    assert float(fedrdn["HT_std"]) == pytest.approx(0.03)
    assert (fedavg["p"], float(fedrdn["p"])) == ("", pytest.approx(1 - math.sqrt(12 / 14)))


def test_latex_is_escaped(write):
    text = summary_table([load_run(write(scores={"site_A & 50%": 0.5}))]).latex()
    assert r"method & site\_A \& 50\% & mean & seeds \\" in text
    assert text.count(r"\begin{tabular}{lrrr}") == text.count(r"\end{tabular}") == 1


def test_markdown_cells_stay_in_their_column(write):
    assert r"| a\|b |" in summary_table([load_run(write(scores={"a|b": 0.5}))]).markdown()


def test_rich_cuts_no_number_in_a_terminal_of_80_columns(seeds):
    console = Console(file=io.StringIO(), width=80)
    console.print(summary_table(seeds))
    text = console.file.getvalue()
    assert "…" not in text
    assert all(part in text for part in ("0.540", "±0.030", "+0.020", "0.074", "fedrdn"))


def test_rich_leaves_out_sites_where_the_terminal_has_no_room_for_all(seeds):
    for width, complete in ((60, False), (120, True)):
        console = Console(file=io.StringIO(), width=width)
        console.print(summary_table(seeds))
        text = console.file.getvalue()
        assert ("DU" in text.splitlines()[1]) == complete
        assert all(part in text for part in ("0.540", "+0.020", "0.074", "0.033"))


def test_rich_reads_no_markup_in_names(write):
    console = Console(file=io.StringIO(), width=80)
    console.print(summary_table([load_run(write(scores={"[red]": 0.5}))]))
    assert "[red]" in console.file.getvalue()


def test_what_cannot_be_scored_is_left_out(write):
    runs = [
        load_run(write(seed=0, scores={"DU": None, "HT": 0.7})),
        load_run(write(seed=1, scores={"DU": None, "HT": 0.5})),
    ]
    (row,) = summary_table(runs).rows
    assert (str(row.sites["DU"]), str(row.mean)) == ("–", "0.600 ± 0.141")
    nothing = load_run(write(seed=2, scores={"DU": None}))
    assert str(summary_table([nothing]).rows[0].mean) == "–"


def test_nothing_is_tested_on_two_seeds(seeds):
    table = summary_table(seeds[:4])
    assert all(row.test is None for row in table.rows)
    assert "p" not in table.header
    assert "none is tested" in table.notes[-1]


def test_only_common_seeds_of_equal_settings_are_compared(write):
    scores = [{"DU": 0.5}, {"DU": 0.6}, {"DU": 0.4}]
    runs = [load_run(write(seed=s, scores=scores[s])) for s in range(3)]
    runs += [load_run(write(methods=("fedfa",), seed=s + 1, scores=scores[s])) for s in range(3)]
    runs += [load_run(write(methods=("fedbn",), seed=s, scores=scores[s], batch_size=4)) for s in range(3)]
    assert all(row.test is None for row in summary_table(runs).rows)


def test_other_settings_make_another_row_and_the_label_tells_them(write):
    runs = [
        load_run(write(methods=("fedfa",), args={"fedfa": {"prob": 0.3}})),
        load_run(write(methods=("fedfa",))),
        load_run(write(batch_size=4, threads=1)),
        load_run(write(batch_size=4, threads=2, seed=1)),
    ]
    labels = list(group_runs(runs))
    assert labels[0] == "fedavg"
    assert labels[1:] == ["fedfa (fedfa.prob=0.3)", "fedfa (fedfa.prob=default)"]


def test_runs_that_do_not_belong_together_are_refused(write):
    one, same, other = write(), write(), write(metric="accuracy", seed=1)
    with pytest.raises(ConfigError, match="same seed"):
        summary_table([load_run(one), load_run(same)])
    with pytest.raises(ConfigError, match="scores accuracy"):
        summary_table([load_run(one), load_run(other)])
    with pytest.raises(ConfigError, match="no run"):
        summary_table([])


# ------------------------------------------------------------------ folds and patients


def patients(site_scores):
    """`test.sites` or `test.unseen` with the given score of each case, and their mean."""
    known = {s: [v for v in cases.values() if v is not None] for s, cases in site_scores.items()}
    return {s: {"dice": sum(known[s]) / len(known[s]), "cases": cases} for s, cases in site_scores.items()}


@pytest.fixture
def fold(write):
    """Write a run of one fold: scores of its patients by site."""

    def make(site_scores, number, named_by="options", unseen=None, **arguments):
        data = content(**arguments)
        data["test"]["sites"], data["test"]["unseen"] = patients(site_scores), patients(unseen or {})
        data["test"]["mean"] = {"dice": fmean(v["dice"] for v in data["test"]["sites"].values())}
        if named_by == "options":
            data["data_options"] = {"folds": True, "fold": number, "fold_seed": data["config"]["seed"]}
        else:
            data["data"] = f"lgg_fold{number}"
        return load_run(write(data))

    return make


@pytest.mark.parametrize("named_by", ["options", "data"])
def test_folds_of_a_seed_are_pooled_so_that_every_patient_counts_once(fold, named_by):
    first = fold({"DU": {"a": 0.2, "b": 0.4}, "HT": {"x": 0.9}}, 0, named_by, unseen={"EZ": {"e": 0.3}})
    second = fold({"DU": {"c": 0.9}, "HT": {"y": 0.5, "z": None}}, 1, named_by, unseen={"EZ": {"e": 0.5}})
    (row,) = summary_table([second, first]).rows
    assert (row.label, row.seeds, row.folds) == ("fedavg", (0,), 2)
    assert row.sites["DU"].values == pytest.approx((0.5,))  # not 0.6, the mean of the folds' means
    assert row.sites["HT"].values == pytest.approx((0.7,))
    assert row.sites["EZ"].values == pytest.approx((0.4,))
    assert row.mean.values == pytest.approx((0.6,))
    table = summary_table([first, second])
    assert table.body[0][-1] == "1 × 2 folds"
    assert "DU 3, EZ 1, HT 3" in table.notes[1]
    assert table.records()[0]["folds"] == 2
    assert "$\\times$" in table.latex()


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
    assert (row.label, row.where, row.seeds, row.test.patients) == ("fedrdn", "training sites", 2, 8)
    assert row.test.difference == pytest.approx(fmean(expected))
    assert row.test.p == wilcoxon_signed_rank(expected)
    assert (row.test.low, row.test.high) == pytest.approx(bootstrap_interval(expected), abs=1e-12)
    assert row.test.detectable == pytest.approx(detectable_difference(stdev(expected), 8))
    assert "1 of the unseen sites' patients in common with fedavg (fedrdn)" in table.notes[-1]
    assert "7 / 1" in table.markdown()
    (record,) = csv.DictReader(io.StringIO(table.csv()))
    assert float(record["difference"]) == pytest.approx(fmean(expected), abs=1e-15)
    assert table.latex().count(r"\\") == 2


@pytest.fixture
def without(write):
    """Write a run without a site: scores of the patients where it trained and where it did not."""

    def make(left_out, seen, unseen, number=0, **arguments):
        data = content(holdout=[left_out], **arguments)
        data["test"]["sites"], data["test"]["unseen"] = patients(seen), patients(unseen)
        data["test"]["mean"] = {"dice": fmean(v["dice"] for v in data["test"]["sites"].values())}
        if number:
            seed = data["config"]["seed"]
            data["data_options"] = {"folds": 2, "fold": number, "fold_seed": seed, "unseen": ""}
        return load_run(write(data))

    return make


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
    assert table.body[0][-4] == "3 × 2 folds × 3 sites"
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
    assert (row.where, row.seeds, row.test.patients) == ("sites left out", 3, 8)
    assert row.test.difference == pytest.approx(fmean(differences))
    assert row.test.p == wilcoxon_signed_rank(differences)
    assert (row.test.low, row.test.high) == pytest.approx(bootstrap_interval(differences))
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


def test_a_site_left_out_is_told_from_one_that_trained(without, write):
    alone = without("CS", {"DU": {"a": 0.9}}, {"CS": {"b": 0.2}})
    (row,) = summary_table([alone]).rows  # one site left out is no turn
    assert row.mean.values == (0.9,)
    assert row.sites["CS"].values == (0.2,)
    other = without("DU", {"CS": {"b": 0.8}}, {"DU": {"a": 0.4}})
    plain = load_run(write(holdout=[], scores={"CS": 0.7, "DU": 0.8}))
    fedfa = load_run(write(methods=("fedfa",), holdout=[], scores={"CS": 0.7, "DU": 0.8}))
    labels = {row.label: row.mean.mean for row in summary_table([alone, other, plain, fedfa]).rows}
    assert labels == pytest.approx(
        {
            "fedavg (holdout=each site in turn)": 0.3,
            "fedavg (holdout=none)": 0.75,
            "fedfa (holdout=none)": 0.75,
        }
    )
    fewer = without("CS", {"DU": {"a": 0.9}}, {"CS": {"b": 0.3}}, methods=("fedfa",))
    table = summary_table([alone, other, fewer])
    assert table.rows[1].mean.mean is None
    assert "fedfa: only 1 of 2 sites were left out; it has no mean." in table.notes


def test_a_name_that_only_looks_like_a_folds_tells_none(write):
    for name, fold, data in (
        ("manifold2", None, "manifold2"),
        ("lgg_fold3", "3", "lgg"),
        ("lgg_multisite_folds-5_fold-10", "10", "lgg_multisite_folds-5"),
    ):
        run = load_run(write({**content(), "data": name}))
        assert (run.fold, run.data) == (fold, data)
    recorded = {"data": "lgg_fold3", "data_options": {"folds": 0, "fold": 1}}
    assert load_run(write({**content(), **recorded})).fold is None
    half = {"data_options": {"folds": 5, "fold": 2}}
    assert "fedavg: 1 of 5 folds;" in summary_table([load_run(write({**content(), **half}))]).notes[-1]


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("b/seed-0", "a/seed-1", "a/.moving"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "results.json").write_text(json.dumps(content()))
    found = find_runs([tmp_path / "runs", tmp_path / "runs/a/seed-1"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["runs/a/seed-1", "runs/b/seed-0"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: holds no finished run"):
        find_runs([tmp_path / "empty"])


def test_a_reduced_table_says_so_in_the_table_itself(seeds):
    table = replace(summary_table(seeds), reduced="scale=0.1, limit=6")
    assert table.markdown().startswith("| method (REDUCED: scale=0.1, limit=6) |")
    assert r"method (REDUCED: scale=0.1, limit=6) &" in table.latex()
    assert {row["reduced"] for row in csv.DictReader(io.StringIO(table.csv()))} == {"scale=0.1, limit=6"}
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert "(REDUCED:" in console.file.getvalue()
    assert "reduced" not in summary_table(seeds).csv()


def test_columns_share_the_room_and_none_is_cut(write):
    runs = [
        load_run(write(seed=k, scores={f"hospital_{s}": 0.5 + 0.01 * k for s in range(4)})) for k in (0, 1)
    ]
    for width in range(70, 130, 7):
        console = Console(file=io.StringIO(), width=width)
        console.print(replace(summary_table(runs), reduced="scale=0.005, limit=6"))
        text = console.file.getvalue()
        assert "…" not in text
        for word in ("seeds", "mean", "0.505", "±0.007", "scale=0.005,"):
            assert word in text


def test_the_scores_of_many_sites_are_in_the_csv_alone(write, tmp_path):
    run = load_run(write(scores={f"writer{k:03}": 0.5 for k in range(200)}))
    table = summary_table([run])
    assert table.header == ["method", "mean", "seeds"]
    assert "200 test cases of 200 sites" in table.notes[1]
    assert table.csv().count("writer") == 2 * 200
    assert len(learning_curves([run]).axes) == 1


def test_patients_are_not_paired_across_other_settings_or_sites_without_names(fold, write):
    scores = {f"p{i}": 0.1 * i for i in range(7)}
    plain = fold({"DU": scores}, 0)
    assert not patient_table([plain]).rows
    assert not patient_table([plain, fold({"DU": scores}, 0, methods=("fedrdn",), batch_size=2)]).rows
    assert not patient_table([plain, fold({"HT": scores}, 0, methods=("fedrdn",))]).rows
    counted = content(methods=("fedrdn",))
    counted["test"]["sites"]["DU"]["cases"] = 7
    assert not patient_table([load_run(write()), load_run(write(counted))]).rows


def test_unseen_patients_are_compared_apart(fold):
    plain, better = ({f"e{i}": 0.1 * i + gain for i in range(6)} for gain in (0.0, 0.2))
    runs = [
        fold({"DU": {"a": 0.5}}, 0, unseen={"EZ": plain}),
        fold({"DU": {"a": 0.1}}, 0, unseen={"EZ": better}, methods=("fedbn",)),
    ]
    (row,) = patient_table(runs).rows
    assert (row.where, row.test.patients) == ("unseen sites", 6)
    assert row.test.difference == pytest.approx(0.2)


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


# ------------------------------------------------------------------ figures


def test_learning_curves_show_every_site_and_the_mean(seeds):
    figure = learning_curves(seeds)
    assert [panel.get_title() for panel in figure.axes] == ["DU", "HT", "mean of sites"]
    mean = figure.axes[-1].lines[0]
    assert list(mean.get_xdata()) == [1, 2, 3]
    assert list(mean.get_ydata()) == pytest.approx([0.15, 0.25, 0.35])
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [list(dot.get_xdata()) for dot in dots] == [[2], [2]]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["fedavg (3 seeds)", "fedrdn (3 seeds)", "selected round"]


def test_learning_curves_leave_out_missing_scores(write):
    data = content()
    data["rounds"][1]["sites"]["DU"]["val_dice"] = None
    del data["rounds"][2]["sites"]["DU"]
    run = load_run(write(data))
    assert run.validation("DU") == [0.1, None, None]
    figure = learning_curves([run])
    assert list(figure.axes[0].lines[0].get_xdata()) == [1]
    figure.savefig(io.BytesIO(), format="svg")


def test_gamma_by_layer(write):
    figure = gamma_by_layer(load_run(write(methods=("fedfa",))))
    assert [panel.get_title() for panel in figure.axes] == ["enc1"]
    low, high = figure.axes[0].lines[:2]
    assert list(low.get_ydata()) == [0.3] * 3
    assert list(high.get_ydata()) == [0.51, 0.52, 0.53]


def test_gamma_by_layer_says_where_there_is_none(write):
    figure = gamma_by_layer(load_run(write()))
    assert not figure.axes
    assert "no γ" in figure.texts[0].get_text()


def test_metric_by_bytes_adds_up_what_was_sent(write):
    (panel,) = metric_by_bytes([load_run(write())]).axes
    assert list(panel.lines[0].get_xdata()) == [2, 4, 6]
    assert "MB" in panel.get_xlabel()


# ------------------------------------------------------------------ report


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_report_holds_everything_and_loads_nothing(write, tmp_path):
    data = content(methods=("fedrdn", "fedfa"), unseen={"EZ": 0.25})
    data["rounds"][1]["refused"] = [
        {"site": "HT", "reason": "site HT, conv: expected finite values, got NaN"}
    ]
    out = write_report([write(), write(data)], tmp_path / "new" / "report.html")
    text = out.read_text()
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[\w+/=]+", "", text))
    for drawing in re.findall(r"base64,([\w+/=]+)", text):
        svg = base64.b64decode(drawing).decode()
        assert not re.search(r'href="(?!#)|<script|<image|@import|url\((?!#)', svg)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "srcset", "href"):
            assert value.startswith("data:image/svg+xml;base64,")
    assert all(alt for name, alt in page.attributes if name == "alt")
    for expected in (
        "0.250",
        "EZ †",
        "fedrdn + fedfa",
        "got NaN",
        "local_epochs",
        "8 kB",
        "γ by layer",
        "1.5 min",
    ):
        assert expected in page.text
    assert page.tags.count("img") == 3
    assert ("name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]


def test_report_escapes_names(write, tmp_path):
    evil = '<script>alert("1")</script>&$\\foo$'
    data = content(scores={evil: 0.5})
    data["config"]["task"] = evil
    data["rounds"][0]["refused"] = [{"site": evil, "reason": "<img src=x onerror=alert(1)>"}]
    text = write_report([write(data)], tmp_path / "r.html").read_text()
    page = Page(text)
    assert "<script" not in text
    assert "onerror" not in [name for name, _ in page.attributes]
    assert page.text.count(evil) >= 3


def test_report_is_the_same_for_the_same_runs(write, tmp_path):
    run = write(methods=("fedfa",))
    first, second = (write_report([run], tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_report_of_a_run_without_validation_scores(write, tmp_path):
    data = content(rounds=1)
    for site in data["rounds"][0]["sites"].values():
        site["val_dice"] = None
    data["rounds"][0].pop("bytes")
    text = Page(write_report([write(data)], tmp_path / "r.html").read_text()).text
    assert "No round has a validation score." in text
    assert "did not record what was sent" in text


def test_report_tells_what_failed_once_however_often_it_happened(write, tmp_path):
    data = content(methods=("fedfa",), rounds=6)
    for entry in data["rounds"]:
        entry["missing"] = []
        if entry["round"] != 4:
            entry["missing"] = [{"site": "CS", "task": "train", "reason": "site CS is not connected"}]
        del entry["refused"]  # older files lack either
    data["left_out"] = {"FG": "site FG: no such folder"}
    data["sites"] = {"DU": 5, "HT": 5}
    del data["test"]["sites"]["HT"]
    data["test"]["missing"] = {"HT": "site HT: no answer in time"}
    text = Page(write_report([write(), write(data)], tmp_path / "r.html").read_text()).text
    assert text.count("site CS is not connected") == 1
    assert "no answer to train1–3, 5–6site CS" in text
    assert "left outsite FG: no such folder" in text
    assert "not testedsite HT: no answer in time" in text
    assert "fedfa, seed 0: HT could not be tested" in text
    nothing = Page(write_report([write()], tmp_path / "n.html").read_text()).text
    assert "refused updatesNone." in nothing


def test_report_states_the_comparison_by_patient_and_what_it_could_see(fold, tmp_path):
    plain = {f"p{i}": 0.1 * i for i in range(8)}
    gains = [0.02, 0.05, 0.01, -0.01, 0.04, 0.03, 0.02, 0.065]
    better = {name: score + gain for (name, score), gain in zip(plain.items(), gains, strict=True)}
    runs = [fold({"DU": plain}, 0), fold({"DU": better}, 0, methods=("fedrdn",))]
    page = write_report([run.path.parent for run in runs], tmp_path / "r.html").read_text()
    (row,) = patient_table(runs).rows
    text = Page(page).text
    assert f"fedrdn, training sites: {fmean(gains):+.3f} Dice against fedavg on the same 8 patients" in text
    assert f"A true difference of {row.test.detectable:.3f} or more would have been seen" in text
    assert "more than the choice of patients explains" in text
    # The tables are there as text, to be copied.
    assert patient_table(runs).csv() in text
    assert summary_table(runs).latex() in text
    alone = Page(write_report([runs[0].path.parent], tmp_path / "a.html").read_text()).text
    assert "Nothing to compare" in alone


def test_tables_are_saved_in_three_forms(seeds, tmp_path):
    table = summary_table(seeds)
    table.save(tmp_path / "new" / "scores.1")
    files = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert files == {
        "scores.1.md": table.markdown(),
        "scores.1.csv": table.csv(),
        "scores.1.tex": table.latex(),
    }


def test_a_bad_run_leaves_an_earlier_report_alone(write, tmp_path):
    out = tmp_path / "r.html"
    earlier = write_report([write()], out).read_text()
    with pytest.raises(DataError):
        write_report([write(seed=1), tmp_path / "nothing"], out)
    assert out.read_text() == earlier
