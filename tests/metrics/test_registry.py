"""Metrics as objects: those of another package, from the command to the page and at a site's border."""

import json
import subprocess
import sys
from statistics import fmean

import pytest
from installed_package import install
from results import Page
from running import TINY_OPTIONS

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation import run_in_process
from medfedaug.metrics.base import MEAN, MEAN_OF_CLASSES, CaseScores, Metric, mean_of_classes
from medfedaug.metrics.registry import METRICS, metric_names, plugin_metric
from medfedaug.runs.load_results import load_run
from medfedaug.utils import plugins

SITES = ["site_A", "site_B", "site_C"]
ADDED = ("jaccard", "volume_error")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    return install("scores.md", "## A metric of your own", "lesion_metrics", source, target)


@pytest.fixture
def package(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    yield installed
    sys.modules.pop("lesion_metrics", None)


@pytest.mark.slow
def test_a_metric_of_a_package_is_in_the_results_and_in_the_report(
    run, package, phantom_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table cuts names
    arguments = (
        "--data",
        phantom_dir,
        "--methods",
        "fedavg",
        "--rounds",
        1,
        "--engine",
        "inprocess",
        "--no-pictures",
    )
    network = (*TINY_OPTIONS, "--engine", "inprocess", "--device", "cpu")
    added = [part for name in ADDED for part in ("--metrics", name)]
    out = tmp_path / "out"
    printed = run.ok("simulate", *arguments, *network, *added, "--lr", 0.02, "--out", out)
    results = json.loads((out / "results.json").read_text())
    test = results["test"]
    assert list(test["mean"]) == [*metric_names("segmentation"), *ADDED]
    assert results["config"]["metrics"] == list(ADDED)
    assert results["metrics"]["volume_error"]["higher_is_better"] is False
    for entry in test["sites"].values():
        # Of one class, the Jaccard index of a case is D / (2 - D).
        expected = {case: dice / (2 - dice) for case, dice in entry["cases"].items()}
        assert entry["case_metrics"]["jaccard"] == pytest.approx(expected)
        assert entry["jaccard"] == pytest.approx(fmean(expected.values()))
        assert entry["classes"]["lesion"]["jaccard"] == pytest.approx(entry["jaccard"])
        assert entry["volume_error"] >= 0
    worst = {site: entry["volume_error"] for site, entry in test["sites"].items()}
    assert test["worst"]["volume_error"]["value"] == max(worst.values())
    assert "jaccard" in printed
    page = Page((out / "report.html").read_text())
    assert "Jaccard index" in page.text
    assert "what two regions have in common, divided by what they cover together." in page.text
    # Read again where the package is not installed, results say what a reader needs.
    for name in ADDED:
        del METRICS[name]
    load_run(out)
    assert METRICS["volume_error"].title == "Volume error (ml)"
    assert METRICS["volume_error"].higher_is_better is False
    assert METRICS["jaccard"].leaves == MEAN


def test_a_site_that_does_not_allow_the_package_says_so_in_a_line(package, phantom_dir, tiny_config):
    config = tiny_config("fedavg", rounds=1, metrics=["jaccard"])
    plugins.restrict([])
    with pytest.raises(MedFedAugError, match="metric 'jaccard' of the package lesion-metrics is not allowed"):
        run_in_process(config, phantom_dir, SITES, "cpu")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["no_such"], "metric 'no_such' is added by no package; added ones: jaccard, volume_error"),
        (["dice"], "metric 'dice' is one of every segmentation"),
        (["jaccard"], "metric jaccard is for segmentation, and the run is a classification"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_in_a_line(package, names, message):
    task = "classification" if names == ["jaccard"] else "segmentation"
    with pytest.raises(ConfigError, match=message):
        metric_names(task, names)


def test_a_bundle_brings_its_own_metrics():
    with pytest.raises(ConfigError, match="metrics follows from the Bundle"):
        RunConfig(bundle={"name": "spleen", "hash": " ".join(["0" * 8] * 8)}, metrics=["jaccard"])


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


class Entry:
    """An entry point whose object is at hand."""

    def __init__(self, found):
        self.found = found

    def load(self):
        return self.found


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("Dice2", {}, "use a free name of small letters"),
        ("cases", {}, "use a free name"),
        ("gap_low", {}, "use a free name"),
        ("gap", {"title": "Gap\x1b[2J"}, "holds a control character"),
        ("gap", {"compute": None}, "task and compute are needed"),
        ("gap", {"task": ""}, "task and compute are needed"),
    ],
)
def test_what_a_package_says_of_its_metric_is_checked(name, values, message):
    given = {"title": "Gap", "task": "segmentation", "compute": mean_of_classes(lambda maps, index: 0.5)}
    plugin = plugins.Plugin(plugins.METRICS, name, "odd-metrics", Entry(Metric(name, **{**given, **values})))
    with pytest.raises(ConfigError, match=message):
        plugin_metric(plugin)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda maps: CaseScores(7.0, [7.0]), "metric odd: a score does not lie between 0 and 1"),
        (lambda maps: CaseScores(0.5, [0.5 / 0]), "metric odd fails"),
    ],
)
def test_a_metric_that_breaks_its_word_ends_the_test_without_telling_a_score(
    compute, message, monkeypatch, phantom_dir, tiny_config
):
    odd = Metric("odd", "Odd", task="segmentation", compute=compute, leaves=MEAN)
    monkeypatch.setattr(
        plugins,
        "installed",
        lambda group: [plugins.Plugin(plugins.METRICS, "odd", "odd-metrics", Entry(odd))],
    )
    config = tiny_config("fedavg", rounds=1, metrics=["odd"])
    results = run_in_process(config, phantom_dir, SITES, "cpu").results()
    told = json.dumps(results["test"])
    assert message in told or message in json.dumps(results), told
    assert "7.0" not in told


def test_what_is_known_of_metrics_needs_neither_torch_nor_monai():
    code = "import sys, medfedaug.metrics.registry; print(*{'torch', 'monai', 'scipy'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
