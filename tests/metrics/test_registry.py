"""Metrics as objects: their declarations, and their limits at a site's border."""

import json
import subprocess
import sys

import pytest

from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.metrics import registry
from medfedaug.metrics.base import MEAN, MEAN_OF_CLASSES, CaseScores, Metric
from medfedaug.tasks import SegmentationTask


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"largest": 2.0, "leaves": MEAN}, "a mean leaves a site only if scores lie between 0 and 1"),
        ({"has_unit": True, "leaves": MEAN_OF_CLASSES}, "a mean leaves a site only if"),
        ({"leaves": "always"}, "leaves 'always' is not known; choose from stays, mean, mean of classes"),
    ],
)
def test_a_metric_cannot_declare_what_no_release_keeps(values, message):
    with pytest.raises(ConfigError, match=message):
        Metric("odd", "Odd", **values)


def test_a_metric_that_breaks_its_word_ends_the_test_without_telling_a_score(
    monkeypatch, phantom_dir, tiny_config
):
    odd = Metric("odd", "Odd", task="segmentation", compute=lambda maps: CaseScores(7.0, [7.0]), leaves=MEAN)
    monkeypatch.setitem(registry.METRICS, "odd", odd)
    monkeypatch.setattr(SegmentationTask, "metrics", (*SegmentationTask.metrics, "odd"))
    sites = ["site_A", "site_B", "site_C"]
    results = run_in_process(tiny_config("fedavg", rounds=1), phantom_dir, sites, "cpu").results()
    assert "metric odd: a score does not lie between 0 and 1" in json.dumps(results)
    assert "7.0" not in json.dumps(results["test"])


def test_what_is_known_of_metrics_needs_neither_torch_nor_monai():
    code = "import sys, medfedaug.metrics.registry; print(*{'torch', 'monai', 'scipy'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
