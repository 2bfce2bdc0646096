"""A method and a metric are one file each: from there they reach lists, tables and results by themselves.

For a setting, tests/config/test_options.py shows the same.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from medfedaug.cli import describe
from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.methods import Method, method_names, registry
from medfedaug.metrics import registry as metrics
from medfedaug.metrics.base import MEAN, Metric, mean_of_classes
from medfedaug.tasks.registry import make_task

GENERATE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs/generate.py"))


class Halfway(Method):
    """A part of the way to the mean.

    Exchange, every round: nothing but a number.

    Args:
        part: the part.
    """

    name = "halfway"
    requires = frozenset({"averaged_parameters"})

    def __init__(self, part: float = 0.5) -> None:
        self.part = part

    def every_round(self, context):
        return None


@pytest.fixture
def halfway(monkeypatch):
    monkeypatch.setitem(registry._BUILT_IN, "halfway", Halfway)
    monkeypatch.setattr(registry, "BUILT_IN_NAMES", (*registry.BUILT_IN_NAMES, "halfway"))


def test_a_file_with_a_method_is_in_the_list_of_methods(tmp_path):
    (tmp_path / "halfway.py").write_text(
        'class _Site:\n    pass\n\nclass Halfway(Method):\n    name = "halfway"\n'
    )
    (tmp_path / "helper.py").write_text("class Helper:\n    size = 3\n")
    (line,) = [line for line in GENERATE["method_list"](tmp_path).splitlines() if "methods." in line]
    assert line == "from medfedaug.methods.halfway import Halfway as Halfway"


def test_a_method_is_in_the_catalogue_and_in_the_tables_of_the_pages(halfway):
    assert "halfway" in method_names()
    method = describe.describe_method("halfway")
    assert [(one.name, one.default) for one in method.arguments] == [("part", "0.5")]
    pages = {path.name: (path.read_text(), text) for path, text in GENERATE["pages"]().items()}
    for before, text in pages.values():
        assert "`halfway`" not in before
        (changed,) = set(text.splitlines()) - set(before.splitlines())
        assert changed.startswith("|")
    assert "| `halfway` | a part of the way to the mean | every round |" in pages["catalogue.md"][1]
    (row,) = [line for line in pages["methods.md"][1].splitlines() if line.startswith("| `averaged_param")]
    assert "`halfway`" in row


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
