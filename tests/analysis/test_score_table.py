"""Scores by method and site: numbers, forms, and what is compared with what."""

import csv
import io
import math

import pytest
from results import content

from medfedaug.analysis import group_runs, summary_table
from medfedaug.errors import ConfigError
from medfedaug.runs.load_results import load_run


@pytest.mark.all_layers
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


@pytest.mark.all_layers
def test_markdown(seeds):
    lines = summary_table(seeds).markdown().splitlines()
    delta, compared = "Δ to fedavg [95% CI]", "p | could see | verdict |"
    assert lines[0] == f"| method | mean | {delta} | DU | HT | EZ † | model | seeds | {compared}"
    assert lines[1] == "| --- |" + " ---: |" * 10
    scores = "0.420 ± 0.020 | 0.620 ± 0.020 | 0.900 ± 0.000"
    assert lines[2] == f"| fedavg | 0.520 ± 0.020 | baseline | {scores} | global | 3 |  |  |  |"
    assert lines[3].startswith("| fedrdn | 0.540 ± 0.030 | +0.020 [-0.005, +0.045] | ")
    assert lines[3].endswith("| global | 3 | 0.074 | 0.033 | open: 3 of 5 seeds, 2 of 20 patients |")


@pytest.mark.all_layers
def test_runs_on_other_files_are_told(write):
    def run(methods, seed, **files):
        return load_run(write({**content(methods=methods, seed=seed), "files": files}))

    same = [run(("fedavg",), 0, DU="a", HT="b"), run(("fedrdn",), 0, DU="a", HT="b")]
    seeds = [run(("fedavg",), 1, DU="c", HT="d"), run(("fedrdn",), 1, DU="c", HT="d")]  # folds differ by seed
    assert not any("files" in note for note in summary_table([*same, *seeds]).notes)
    corrected = run(("fedfa",), 0, DU="a", HT="corrected")
    (note,) = (n for n in summary_table([*same, *seeds, corrected]).notes if "files" in n)
    assert note.startswith("fedfa: not the same files as fedavg at HT; the data may cause a difference")
    earlier = load_run(write(methods=("fedfd_a",)))  # a release that recorded none
    assert not any("fedfd_a" in n and "files" in n for n in summary_table([*same, earlier]).notes)


@pytest.mark.all_layers
def test_csv_has_full_precision(seeds):
    fedavg, fedrdn = csv.DictReader(io.StringIO(summary_table(seeds).csv()))
    assert fedavg["seeds"] == "0 1 2"
    assert float(fedrdn["mean"]) == pytest.approx(0.54, abs=1e-15)
    assert float(fedrdn["HT_std"]) == pytest.approx(0.03)
    assert (fedavg["p"], float(fedrdn["p"])) == ("", pytest.approx(1 - math.sqrt(12 / 14)))


def test_what_cannot_be_scored_is_left_out(write):
    runs = [
        load_run(write(seed=0, scores={"DU": None, "HT": 0.7})),
        load_run(write(seed=1, scores={"DU": None, "HT": 0.5})),
    ]
    (row,) = summary_table(runs).rows
    assert (str(row.sites["DU"]), str(row.mean)) == ("–", "0.600 ± 0.141")
    nothing = load_run(write(seed=2, scores={"DU": None}))
    assert str(summary_table([nothing]).rows[0].mean) == "–"


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


@pytest.mark.parametrize(
    ("one", "other", "labels"),
    [
        (0.10001, 0.10002, ["fedprox (fedprox.mu=0.10001)", "fedprox (fedprox.mu=0.10002)"]),
        (0.1, 0.25, ["fedprox (fedprox.mu=0.1)", "fedprox (fedprox.mu=0.25)"]),
        (1 / 6, 0.1667, ["fedprox (fedprox.mu=0.16666666666666666)", "fedprox (fedprox.mu=0.1667)"]),
        (None, [], ["fedprox (fedprox.mu=null)", "fedprox (fedprox.mu=[])"]),
    ],
)
def test_no_row_is_lost_to_another_of_the_same_label(write, one, other, labels):
    runs = [load_run(write(methods=("fedprox",), args={"fedprox": {"mu": mu}})) for mu in (one, other)]
    assert [row.label for row in summary_table(runs).rows] == labels


def test_runs_that_do_not_belong_together_are_refused(write):
    one, same, other = write(), write(), write(metric="accuracy", seed=1)
    with pytest.raises(ConfigError, match="same seed"):
        summary_table([load_run(one), load_run(same)])
    with pytest.raises(ConfigError, match="scores accuracy"):
        summary_table([load_run(one), load_run(other)])
