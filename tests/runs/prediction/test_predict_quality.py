"""`medfedaug predict`: its page, and a model without a good test."""

import json
import shutil

import nibabel
import numpy as np
import pydicom
import pytest
from finished_runs import with_scores
from results import Page
from written_series import series


@pytest.fixture(scope="module")
def model(tmp_path_factory, model):
    return with_scores(shutil.copytree(model, tmp_path_factory.mktemp("quality") / "run"), 0.8)


@pytest.fixture(scope="module")
def image(phantom_dir):
    return next((phantom_dir / "site_C/images").glob("*.nii.gz"))


def read(path) -> np.ndarray:
    return np.asarray(nibabel.load(path).dataobj)


def predicted(run, out) -> dict:
    return json.loads((out / "predictions.json").read_text())


def test_the_page_shows_the_cases_in_the_order_of_the_list(run, model, image, phantom_dir, tmp_path):
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    for number, file in enumerate(sorted((phantom_dir / "site_C/images").iterdir())[:3]):
        shutil.copy(file, images / f"case {number} <b>.nii.gz")
    (images / "broken.nii.gz").write_bytes(b"\x1f\x8b")
    code, printed, _ = run("predict", "--model", model, "--images", images, "--out", out)
    assert code == 1
    assert f"page: {out}/predictions.html" in printed
    page = Page((out / "predictions.html").read_text())
    order = predicted(run, out)["look_first"]
    assert len(order) == 3
    places = [page.text.index(name) for name in order]
    assert places == sorted(places)
    assert "b" not in page.tags
    pictures = [value for key, value in page.attributes if key == "src"]
    assert len(pictures) == 3
    assert all(one.startswith("data:image/jpeg;base64,") for one in pictures)
    assert "broken" in page.text
    assert "no estimate of the Dice" in page.text
    for entry in predicted(run, out)["cases"].values():  # no number that looks like a Dice
        assert all(f"{value:.3f}" not in page.text + printed for value in entry["confidence"].values())
    assert "confidence" not in (page.text + printed).casefold()
    other = tmp_path / "other"
    other.mkdir()
    (other / "predictions.html").write_text("<p>somebody's own</p>")
    err = run.refused("predict", "--model", model, "--images", image, "--out", other)
    assert "choose another file" in err
    assert not (other / "predictions.json").exists()


@pytest.mark.all_layers
@pytest.mark.parametrize(
    ("dice", "score", "warning"),
    [
        (
            0.0,
            "test Dice 0.00 (mean of 2 sites, lowest 0.00)",
            "the model learned nothing: every test Dice is 0",
        ),
        (
            0.3,
            "test Dice 0.30 (mean of 2 sites, lowest 0.30)",
            "overlapped the reference with a Dice of only 0.30",
        ),
        (None, "no test score", "the run has no test score"),
    ],
)
def test_a_model_without_a_good_test_is_not_believed(run, model, phantom_dir, tmp_path, dice, score, warning):
    pytest.importorskip("highdicom", reason="pip install 'medfedaug[dicom]'")
    useless, images, out = tmp_path / "run", tmp_path / "images", tmp_path / "out"
    shutil.copytree(model, useless)
    with_scores(useless, dice)
    for number, file in enumerate(sorted((phantom_dir / "site_C/images").iterdir())[:2]):
        volume = nibabel.load(file)
        series(images / f"case{number}", (read(file) * 1000).astype(np.int16), volume.affine, f"1.2.{number}")
    code, printed, err = run("predict", "--model", useless, "--images", images, "--out", out, "--report")
    assert code == 0, err
    assert f"do not rely on these predictions: {warning}" in err.replace("in its test the model ", "")
    assert score in printed
    assert "first ones first" not in printed
    page = Page((out / "predictions.html").read_text())
    assert page.text.index("Do not rely on these predictions") < page.text.index(score)
    assert warning in page.text
    assert page.text.index(score) < page.text.index("2 cases")
    assert "first ones" not in page.text
    assert page.text.index("case0") < page.text.index("case1")
    assert predicted(run, out)["test"]["score"] == score
    seg, report = (pydicom.dcmread(out / f"case0.{ending}") for ending in ("dcm", "sr.dcm"))
    assert seg.SeriesDescription == "medfedaug segmentation: DO NOT RELY ON IT"
    told = seg.SegmentSequence[0].SegmentationAlgorithmIdentificationSequence[0].AlgorithmParameters
    assert f"test={score}" in told
    assert warning in told
    first = report.ContentSequence[0]
    assert first.ConceptNameCodeSequence[0].CodeMeaning == "Comment"
    assert first.TextValue.startswith("DO NOT RELY ON IT: ")
    assert score in first.TextValue
