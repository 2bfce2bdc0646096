"""Verdicts of an evaluation, by a metric of either direction."""

import pytest

from medfedaug.metrics.base import Metric
from medfedaug.metrics.registry import METRICS, described, find_metric
from medfedaug.research.comparison.local_vs_global import worth_table


def evaluation(metric, low, high, **more):
    """One site with 24 patients, whose global model differs from the local one by 0.5 (low to high)."""
    difference = {"difference": (low + high) / 2, "low": low, "high": high, "p": 0.01, "patients": 24}
    scores = {"local": {metric: 3.0}, "global": {metric: 3.5, "against": {"local": difference}}}
    return {"metric": metric, "models": {"global": {"scored": "global"}}, "sites": {"A": scores}, **more}


@pytest.fixture
def own_metric():
    """Makes a metric of a Bundle known within a test."""
    before = dict(METRICS)
    yield lambda: METRICS.setdefault("mean_gap", Metric("mean_gap", "Mean gap", False, 1e5))
    METRICS.clear()
    METRICS.update(before)


@pytest.mark.parametrize(
    ("metric", "verdicts"),
    [
        ("dice", ("better", "no difference shown", "worse")),
        ("hd95", ("worse", "no difference shown", "better")),
    ],
)
def test_worth_follows_the_direction_of_the_metric(metric, verdicts):
    words = {"better": "is worth it", "worse": "better off by itself", "no difference shown": "neither"}
    ends = ((0.25, 0.75), (-0.25, 0.75), (-0.75, -0.25))
    for (low, high), verdict in zip(ends, verdicts, strict=True):
        table = worth_table(evaluation(metric, low, high))
        assert table.rows[0].verdict == verdict
        assert words[verdict] in table.rows[0].sentence
        assert ("lower is better" in table.notes[0]) == (metric == "hd95")


@pytest.mark.parametrize(
    ("ours", "local", "words"),
    [
        (0.8, 0.6, "both models have a score there, but the site sends no comparison"),
        (0.8, None, "the local model has no score there"),
        (None, 0.6, "the global model has no score there"),
    ],
)
def test_a_comparison_that_is_missing_has_its_own_reason(ours, local, words):
    """One case is scored by both models, and is no comparison."""
    found = evaluation("dice", 0.25, 0.75)
    found["sites"]["A"] = {"local": {"dice": local}, "global": {"dice": ours, "against": {}}}
    (row,) = worth_table(found).rows
    assert row.verdict == "–"
    assert words in row.sentence


def test_the_direction_of_a_bundles_metric_is_in_the_file(own_metric):
    own_metric()
    told = described(["mean_gap", "dice"])
    assert list(told["metrics"]) == ["mean_gap"]
    del METRICS["mean_gap"]  # another process, which has never seen the Bundle
    (row,) = worth_table(evaluation("mean_gap", 0.25, 0.75, **told)).rows
    assert not find_metric("mean_gap").higher_is_better
    assert row.verdict == "worse"
