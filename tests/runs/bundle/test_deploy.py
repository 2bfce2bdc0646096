"""`medfedaug bundle --map`: a MONAI application whose inference is the Bundle's own."""

from __future__ import annotations

import ast
import importlib.util
import json

import numpy as np
import pydicom
import pytest
from dicom_files import write_slices
from finished_runs import FEW, balanced, simulated

hd = pytest.importorskip("highdicom", reason="pip install 'medfedaug[dicom]'")

ANGLE = np.deg2rad(20)
OBLIQUE = np.array([[1, 0, 0], [0, np.cos(ANGLE), -np.sin(ANGLE)], [0, np.sin(ANGLE), np.cos(ANGLE)]])


@pytest.fixture(scope="module")
def model(tmp_path_factory, phantom_dir):
    out = tmp_path_factory.mktemp("map") / "run"
    return balanced(simulated(phantom_dir, out, "fedrdn", *FEW, "--image-size", 24), phantom_dir, "site_A")


def test_the_application_gives_the_label_map_of_predict(run, model, tmp_path):
    site = ("--site", "site_A")
    out, app = tmp_path / "bundle", tmp_path / "application"
    code, said, err = run("bundle", model, "--out", out, *site, "--map", app)
    assert code == 0, err
    assert "app/app.py, since MONAI Deploy's SDK needs CUDA" in said
    assert "NOT run" in (app / "README.md").read_text()
    sources = {"__main__.py", "app.py", "app.yaml", "bundle_inference.py", "requirements.txt"}
    assert {path.name for path in (app / "app").iterdir()} == sources | {"segments.json", "series.json"}
    for name in ("app.py", "bundle_inference.py", "__main__.py"):
        for node in ast.walk(ast.parse((app / "app" / name).read_text())):
            named = [node.module] if isinstance(node, ast.ImportFrom) else []
            named += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert not [one for one in named if one.startswith("medfedaug")]
    (segment,) = json.loads((app / "app/segments.json").read_text())["segments"]
    assert (segment["label"], segment["type"]["value"]) == ("lesion", "CLASS1")

    voxels = np.random.default_rng(0).integers(0, 1000, (40, 28, 6)).astype(np.int16)
    files = write_slices(tmp_path / "series", voxels, turned=OBLIQUE)
    code, _, err = run(
        *("predict", "--model", model, "--images", tmp_path / "series", "--out", tmp_path / "out"),
        *(*site, "--no-previews"),
    )
    assert code == 0, err
    seg = hd.seg.segread(tmp_path / "out/series.dcm")
    slices = [pydicom.dcmread(file) for file in files]  # in no order
    expected = seg.get_pixels_by_source_instance(
        [one.SOPInstanceUID for one in slices], assert_missing_frames_are_empty=True
    )[..., 0]
    assert 0 < expected.sum() < expected.size

    spec = importlib.util.spec_from_file_location("bundle_inference", app / "app/bundle_inference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.label_slices(app / "model/bundle", slices)
    np.testing.assert_array_equal(found, expected)

    code, _, err = run("bundle", model, "--out", tmp_path / "second", *site, "--map", app)
    assert code == 2
    assert "is not an empty folder" in err
    assert not (tmp_path / "second").exists()
