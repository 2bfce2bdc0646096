"""`medfedaug report --features`."""

import json
import re

import pytest
import torch
from sweeps import OFFICE_PRESET, planned

from medfedaug.research.comparison.features import SiteFeatures, alignment, site_features, uniformity
from medfedaug.research.sweeps.local_features import local_features
from medfedaug.research.sweeps.sweep import run_all
from medfedaug.runs.evaluate import open_model
from medfedaug.runs.load_results import load_run

SITES = ["amazon", "caltech", "dslr", "webcam"]


@pytest.fixture(scope="module")
def finished(office, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    runs = planned(office, "fedavg", seeds=1)
    run_all(runs, OFFICE_PRESET, office, out, device="cpu")
    return out / runs[0].folder


def test_features_of_the_global_and_of_each_local_model_are_on_the_page(run, finished, office, tmp_path):
    page = tmp_path / "report.html"
    run.ok("report", finished, "--data", office, "--features", "--out", page, "--device", "cpu")
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"<h3[^>]*>([^<]*)</h3>", text)
    assert [name for name in SITES if any(f"local model of {name}" in text for text in headings)] == SITES
    assert len(re.findall(r"alignment \d\.\d{3}, uniformity -\d\.\d{3}", text)) == 1 + len(SITES)
    assert not (finished / "cross_site.json").exists()
    code, _, err = run("report", finished, "--features", "--out", page)
    assert code != 0
    assert "--features needs the sites' images: --data" in err


def test_local_features_are_those_of_networks_that_were_trained_on(finished, office):
    record = load_run(finished)
    by_site = local_features([record], office, "cpu")[record.path]
    assert list(by_site) == SITES
    (opened, _), *_ = open_model(finished / "global_model.pt", office, config=record.path, device="cpu")
    seen = SiteFeatures()
    cases = opened.folder.cases["test"]
    seen.add(opened, opened.network, cases)
    images = [opened.evaluation_transform()({"image": opened.folder.load_image(c)})["image"] for c in cases]
    torch.testing.assert_close(
        torch.cat(seen.parts), site_features(opened.network, [torch.stack(images)]), check_dtype=False
    )
    local = by_site["amazon"]
    assert local.sites[: len(seen)] == seen.sites
    assert not torch.allclose(local.parts[0], seen.parts[0])
    classes = torch.tensor([sorted(set(local.labels)).index(label) for label in local.labels])
    features = torch.cat(local.parts)
    expected = f"alignment {alignment(features, classes):.3f}, uniformity {uniformity(features):.3f}"
    assert local.measures() == expected


def test_a_run_without_local_models_says_why(finished, office, recwarn):
    record = load_run(finished)
    content = json.loads(record.path.read_text())
    content["config"]["methods"] = [{"name": "pooled", "args": {}}]
    record.path.with_name("results.json").write_text(json.dumps(content))
    assert local_features([record], office, "cpu") == {record.path: {}}
    assert any("no features of local models" in str(warning.message) for warning in recwarn)
