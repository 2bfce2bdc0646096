"""`medfedaug calibrate` at a site, and `medfedaug predict` with its file."""

import json
import shutil
import stat
from pathlib import Path

import nibabel
import numpy as np
import pytest
from finished_runs import FEW, balanced, rehashed, simulated
from running import command
from written_series import series
from written_volumes import load_volume, write

from medfedaug.data.io.formats import read_header
from medfedaug.data.phantom import make_phantom
from medfedaug.hospital.assurance.calibrate import Measured
from medfedaug.hospital.assurance.risk_control import LEVELS, Curve


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Two sites with ten validation patients each, a run over slices, and its calibration."""
    root = tmp_path_factory.mktemp("calibrated")
    make_phantom(root / "data", sites=2, patients=50, shape=(16, 16, 4), seed=0)
    run = simulated(root / "data", root / "run", "fedavg", *FEW)
    balanced(run, root / "data", "site_A")
    command.ok("calibrate", run, "--data", root / "data/site_A", "--out", root / "calibration.json")
    return root


@pytest.fixture
def new_images(place, tmp_path) -> Path:
    """The images of site A's validation patients, and nothing else."""
    site, images = place / "data/site_A", tmp_path / "new"
    images.mkdir()
    for row in json.loads((site / "dataset.json").read_text())["validation"]:
        shutil.copy(site / row["image"], images)
    return images


@pytest.fixture
def predict(place):
    """Predict as of site A, with its calibration."""

    def call(images: Path, out: Path, *options, site: str = "site_A", file: str = "calibration.json") -> dict:
        common = ("--no-previews", "--calibration", place / file, *(("--site", site) if site else ()))
        command.ok("predict", "--model", place / "run", "--images", images, "--out", out, *common, *options)
        return json.loads((out / "predictions.json").read_text())

    return call


def structures(file: Path, site: str = "site_A") -> dict:
    return json.loads(file.read_text())["sites"][site]["structures"]


def copy_of_site(place: Path, folder: Path) -> tuple[Path, dict]:
    """A copy of site A, and its listing."""
    site = Path(shutil.copytree(place / "data/site_A", folder / "site_A"))
    return site, json.loads((site / "dataset.json").read_text())


def test_controlled_maps_miss_what_the_calibration_says(place, new_images, predict, tmp_path):
    record, missed = predict(new_images, tmp_path / "out"), []
    for case in record["cases"].values():
        file = case["controlled"]["lesion"]["file"]
        truth = load_volume(place / "data/site_A/labels" / Path(file).name).numpy() == 1
        missed.append((load_volume(tmp_path / "out" / file).numpy()[truth] == 0).mean())
    entry = structures(place / "calibration.json")["lesion"]
    assert np.mean(missed) == pytest.approx(entry["loss"])
    assert (sum(missed) + 1) / 11 <= 0.1
    assert (entry["patients"], entry["needed"]) == (10, 9)


def test_the_threshold_is_the_largest_level(place, new_images, predict, tmp_path):
    """At the next one, the validation patients miss too much."""
    record, missed = predict(new_images, tmp_path / "out", "--probabilities"), []
    threshold = structures(place / "calibration.json")["lesion"]["threshold"]
    following = LEVELS[int(np.searchsorted(LEVELS, threshold)) + 1]
    for case in record["cases"].values():
        name = case["label_map"]
        truth = load_volume(place / "data/site_A/labels" / name).numpy()[0] == 1
        missed.append(
            (load_volume(tmp_path / "out/probabilities" / name).numpy()[1][truth] < following).mean()
        )
    assert (sum(missed) + 1) / 11 > 0.1


def test_the_extra_volume_is_that_of_the_maps(place, new_images, predict, tmp_path):
    cases = predict(new_images, tmp_path / "out")["cases"].values()
    extra = [case["controlled"]["lesion"]["volume_ml"] - case["volume_ml"]["lesion"] for case in cases]
    expected = structures(place / "calibration.json")["lesion"]["extra"]
    assert expected == pytest.approx([np.median(extra), min(extra), max(extra)], rel=1e-4)


def test_the_sentence_is_in_the_record_and_on_the_page(new_images, predict, tmp_path):
    text = predict(new_images, tmp_path / "out")["promises"]["lesion"]
    assert text.startswith(
        "at most 10% of the lesion missed in the mean of patients like those of site_A (10 "
    )
    assert text.endswith("model of round 1)")
    assert text in (tmp_path / "out/predictions.html").read_text()


def test_only_its_owner_reads_the_file(place):
    assert stat.S_IMODE((place / "calibration.json").stat().st_mode) == 0o600


def test_a_calibration_in_the_runs_folder_is_used(place, new_images, tmp_path):
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    command.ok("calibrate", run, "--data", place / "data/site_A")
    call = ("predict", "--model", run, "--images", new_images, "--out", tmp_path / "out", "--no-previews")
    assert "promise, lesion: at most 10%" in command.ok(*call, "--site", "site_A")


def test_an_image_outside_the_calibrated_ranges_gets_no_promise(new_images, predict, tmp_path):
    file = sorted(new_images.iterdir())[0]
    image = nibabel.load(file)
    inverted = np.asarray(image.dataobj).max() - np.asarray(image.dataobj)
    write(tmp_path / "odd/odd.nii.gz", inverted.astype(np.float32), image.affine)
    entry = predict(tmp_path / "odd", tmp_path / "out")["cases"]["odd"]
    assert "outside the calibrated" in entry["no_promise"][0]
    assert "controlled" not in entry
    assert not list((tmp_path / "out").rglob("controlled/**/*.nii.gz"))


def test_an_image_that_leaves_the_ranges_loses_its_map(new_images, predict, tmp_path):
    file = sorted(new_images.iterdir())[0]
    assert "controlled" in predict(file, tmp_path / "out")["cases"][file.name.removesuffix(".nii.gz")]
    image = nibabel.load(file)
    write(
        file, (np.asarray(image.dataobj).max() - np.asarray(image.dataobj)).astype(np.float32), image.affine
    )
    predict(file, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("controlled/**/*.nii.gz"))


def test_predictions_with_another_calibration_are_not_continued(place, new_images, predict, tmp_path):
    predict(new_images, tmp_path / "out")
    command.ok(
        "calibrate",
        place / "run",
        "--data",
        place / "data/site_A",
        "--out",
        tmp_path / "c.json",
        "--miss",
        0.2,
    )
    call = (
        "predict",
        "--model",
        place / "run",
        "--images",
        new_images,
        "--out",
        tmp_path / "out",
        "--no-previews",
    )
    err = command.refused(*call, "--site", "site_A", "--calibration", tmp_path / "c.json")
    assert "other options: calibration" in err


def test_a_calibration_of_another_model_is_refused(place, new_images, tmp_path):
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    shutil.copy(run / "final_model.pt", run / "global_model.pt")
    rehashed(run)
    call = ("predict", "--model", run, "--images", new_images, "--out", tmp_path / "out")
    err = command.refused(*call, "--site", "site_A", "--calibration", place / "calibration.json")
    assert "calibrated for another model" in err


def test_a_calibration_of_another_site_is_refused(place, new_images, tmp_path):
    call = ("predict", "--model", place / "run", "--images", new_images, "--out", tmp_path / "out")
    err = command.refused(*call, "--site", "site_B", "--calibration", place / "calibration.json")
    assert "calibrated for site_A, and the images come from site_B" in err


def test_a_damaged_calibration_is_refused(place, new_images, tmp_path):
    (tmp_path / "c.json").write_text((place / "calibration.json").read_text()[:200])
    call = ("predict", "--model", place / "run", "--images", new_images, "--out", tmp_path / "out")
    assert "not readable as a calibration" in command.refused(*call, "--calibration", tmp_path / "c.json")


def test_too_few_patients_promise_nothing(place, tmp_path):
    site, listing = copy_of_site(place, tmp_path)
    (site / "dataset.json").write_text(json.dumps({**listing, "validation": listing["validation"][:8]}))
    printed = command.ok("calibrate", place / "run", "--data", site, "--out", tmp_path / "c.json")
    entry = structures(tmp_path / "c.json")["lesion"]
    assert entry == {
        "patients": 8,
        "needed": 9,
        "reason": "8 patients with lesion, and at least 9 are needed",
    }
    assert "site_A: lesion: no promise: 8 patients with lesion, and at least 9 are needed" in printed


def test_patients_without_the_structure_do_not_count(place, tmp_path):
    site, listing = copy_of_site(place, tmp_path)
    file = site / listing["validation"][0]["label"]
    stored = nibabel.load(file)
    write(file, np.zeros(stored.shape, np.uint8), stored.affine)
    command.ok("calibrate", place / "run", "--data", site, "--out", tmp_path / "c.json")
    assert structures(tmp_path / "c.json")["lesion"]["patients"] == 9


def test_cases_without_an_outline_do_not_count(place, tmp_path):
    site, listing = copy_of_site(place, tmp_path)
    del listing["validation"][0]["label"]
    listing["labelled"] = ["lesion"]
    (site / "dataset.json").write_text(json.dumps(listing))
    command.ok("calibrate", place / "run", "--data", site, "--out", tmp_path / "c.json")
    assert structures(tmp_path / "c.json")["lesion"]["patients"] == 9


def test_images_of_one_patient_count_once():
    row = [Curve(np.full(len(LEVELS), loss), np.zeros(len(LEVELS)), loss, 0) for loss in (0.2, 0.4, 0.9)]
    curves = {"lesion": {("P1", ""): row[:2], ("P2", ""): row[2:]}}
    losses = Measured(curves, {}, np.empty((3, 2, 1))).losses("lesion")
    assert losses[:, 0] == pytest.approx([0.3, 0.9])


def test_a_copy_of_a_training_image_is_refused(place, tmp_path):
    site, listing = copy_of_site(place, tmp_path)
    shutil.copy(site / listing["training"][0]["image"], site / listing["validation"][0]["image"])
    err = command.refused("calibrate", place / "run", "--data", site, "--out", tmp_path / "c.json")
    assert "is that of a training case" in err


def test_a_bundle_has_the_thresholds_and_the_card_the_sentence(place, tmp_path):
    call = ("bundle", place / "run", "--out", tmp_path / "bundle", "--site", "site_A")
    command.ok(*call, "--calibration", place / "calibration.json")
    metadata = json.loads((tmp_path / "bundle/configs/metadata.json").read_text())
    threshold = structures(place / "calibration.json")["lesion"]["threshold"]
    assert metadata["calibrated_thresholds"] == {"lesion": threshold}
    assert "at most 10% of the lesion" in (tmp_path / "bundle/docs/model_card.md").read_text()


def test_the_card_of_a_run_has_the_sentence_of_each_site(place, tmp_path):
    call = ("report", place / "run", "--card", "--out", tmp_path)
    command.ok(*call, "--calibration", place / "calibration.json")
    assert "at most 10% of the lesion missed" in (tmp_path / "model_card.md").read_text()


def test_several_sites_are_calibrated_each_and_pooled(place, tmp_path):
    command.ok("calibrate", place / "run", "--data", place / "data", "--out", tmp_path / "c.json")
    content = json.loads((tmp_path / "c.json").read_text())
    assert structures(tmp_path / "c.json") == structures(place / "calibration.json")
    assert content["pooled"]["lesion"]["patients"] == 20
    assert content["pooled"]["lesion"]["loss"].keys() == {"site_A", "site_B"}


def test_the_sentence_has_the_confidence(place, tmp_path):
    pytest.importorskip("mapie", reason="pip install 'medfedaug[assurance]'")
    call = ("calibrate", place / "run", "--data", place / "data/site_A", "--out", tmp_path / "c.json")
    assert "with 80% confidence, at most 30%" in command.ok(*call, "--miss", 0.3, "--confidence", 0.8)


def test_the_sentence_of_lesions_counts_parts(place, tmp_path):
    call = ("calibrate", place / "run", "--data", place / "data/site_A", "--out", tmp_path / "c.json")
    assert "at most 10% of the separate parts of the lesion" in command.ok(*call, "--risk", "lesions")


def test_an_unknown_structure_is_refused(place):
    err = command.refused(
        "calibrate", place / "run", "--data", place / "data/site_A", "--structure", "tumour"
    )
    assert "--structure 'tumour' is not known; choose from lesion" in err


def test_a_file_that_is_no_calibration_is_not_replaced(place, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    call = ("calibrate", place / "run", "--data", place / "data/site_A", "--out", tmp_path / "other.json")
    assert "is not a calibration" in command.refused(*call)


def test_a_site_outside_the_run_needs_statistics_where_methods_normalise(place, tmp_path):
    run = simulated(place / "data", tmp_path / "run", "fedrdn", *FEW)
    site = Path(shutil.copytree(place / "data/site_A", tmp_path / "elsewhere"))
    assert "give --statistics FILE" in command.refused("calibrate", run, "--data", site)


def test_sets_of_classes_are_those_above_the_threshold(make_photos, tmp_path):
    for name in "AB":
        make_photos(name, per_class=25)
    data, run = tmp_path / "photos", tmp_path / "run"
    call = ("simulate", "--data", data, "--methods", "fedrdn", "--out", run, "--engine", "inprocess")
    command.ok(*call, "--rounds", 1, "--image-size", 32, "--no-report", "--network", "lenet5")
    command.ok("calibrate", run, "--data", data / "A", "--split", "test")
    threshold = structures(run / "calibration.json", "A")["classes"]["threshold"]
    call = ("predict", "--model", run, "--images", data / "A", "--out", tmp_path / "out", "--no-previews")
    command.ok(*call, "--site", "A")
    cases = json.loads((tmp_path / "out/predictions.json").read_text())["cases"].values()
    promised = [case for case in cases if "no_promise" not in case]
    assert promised
    for case in promised:
        assert case["set"] == [name for name, share in case["probabilities"].items() if share >= threshold]


def test_a_controlled_dicom_seg_has_the_sentence(place, tmp_path, predict):
    hd = pytest.importorskip("highdicom", reason="pip install 'medfedaug[dicom]'")
    source = sorted((place / "data/site_A/images").iterdir())[0]
    image = load_volume(source).numpy()[0]
    series(tmp_path / "head", (image * 10).astype(np.int16), read_header(source).affine, "1.2.3")
    record = predict(tmp_path / "head", tmp_path / "out", "--report")
    entry = record["cases"]["head"]
    file = tmp_path / "out" / entry["controlled"]["lesion"]["file"]
    controlled, plain = hd.seg.segread(file), hd.seg.segread(tmp_path / "out/head.dcm")
    assert controlled.SegmentSequence[0].SegmentDescription == record["promises"]["lesion"]
    assert controlled.SeriesDescription.startswith("medfedaug controlled map")
    assert controlled.SOPInstanceUID != plain.SOPInstanceUID
    report = hd.sr.srread(tmp_path / "out/head.sr.dcm")
    texts = [str(item.TextValue) for item in report.ContentSequence if "TextValue" in item]
    assert any(record["promises"]["lesion"] in text for text in texts)
