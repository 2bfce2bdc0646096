"""A metric is one object: it reaches the results by itself, and a run may leave metrics out."""

import subprocess
import sys

import pytest

from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.metrics import registry as metrics
from medfedaug.metrics.base import MEAN, MEAN_OF_CLASSES, Metric, mean_of_classes
from medfedaug.tasks.registry import make_task


def _sensitivity(maps, index):
    predicted, truth = maps.structure(index)
    return float((predicted & truth).sum() / truth.sum()) if bool(truth.any()) else None


def test_a_metric_is_in_the_results_and_another_one_is_left_out(monkeypatch, phantom_dir, tiny_config):
    metric = Metric(
        "sensitivity", "Sensitivity", task="segmentation", compute=mean_of_classes(_sensitivity), leaves=MEAN
    )
    monkeypatch.setitem(metrics._BUILT_IN, metric.name, metric)
    monkeypatch.setitem(metrics.METRICS, metric.name, metric)
    config = tiny_config("fedavg", rounds=1, without_metrics=["hd95"])
    test = run_in_process(config, phantom_dir, ["site_A", "site_B"], "cpu").results()["test"]
    assert list(test["mean"]) == [*metrics.metric_names("segmentation", without=["hd95"])]
    assert "sensitivity" in test["mean"]
    for entry in test["sites"].values():
        assert 0 <= entry["sensitivity"] <= 1
        assert "hd95" not in {*entry, *entry["case_metrics"], *entry["classes"]["foreground"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"largest": 2.0, "leaves": MEAN}, "a mean leaves a site only if scores lie between 0 and 1"),
        ({"has_unit": True, "leaves": MEAN_OF_CLASSES}, "a mean leaves a site only if"),
    ],
)
def test_a_metric_cannot_declare_what_no_release_keeps(values, message):
    with pytest.raises(ConfigError, match=message):
        Metric("odd", "Odd", **values)


def test_what_is_known_of_metrics_needs_neither_torch_nor_monai():
    code = "import sys, medfedaug.metrics.registry; print(*{'torch', 'monai', 'scipy'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dice", "chooses the round and stays"),
        ("hd59", "is not known; did you mean hd95"),
        ("auc", "is not known"),
    ],
)
def test_a_metric_that_cannot_be_left_out_is_one_line(tiny_config, name, words):
    with pytest.raises(ConfigError, match=f"^without_metrics: metric '{name}' {words}"):
        make_task(tiny_config("fedavg", without_metrics=[name]), normalised=False)
