"""`medfedaug predict` on volumes: formats, grids, equality with the evaluation, and what goes wrong."""

import json
import shutil
from itertools import permutations, product
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
from finished_runs import balanced, dice_of, simulated
from PIL import Image
from written_volumes import AFFINE, load_volume, turn, write

from medfedaug.data.phantom import make_phantom
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.prediction.predictions_file import Predictions

GEOMETRY = ("pixdim", "xyzt_units", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d")
GEOMETRY += ("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z")


@pytest.fixture
def slices(model) -> Path:
    """A run that sees slices, and normalises nothing."""
    return model


@pytest.fixture(scope="module")
def isotropic(tmp_path_factory) -> tuple[Path, Path]:
    """A run of volumes that are brought to one orientation and to cubes, with FedRDN; and its data."""
    root = tmp_path_factory.mktemp("isotropic")
    make_phantom(root / "data", sites=2, patients=3, spacings=[(8, 8, 8), (10, 10, 10)], seed=0)
    plan = ("--spatial-dims", 3, "--orientation", "RAS", "--spacing", "10,10,10", "--patch-size", "16,16,16")
    run = simulated(root / "data", root / "run", "fedrdn", *plan)
    return balanced(run, root / "data", "site_A"), root / "data"


def predictions(out: Path) -> dict:
    return json.loads((out / "predictions.json").read_text())


def voxels(path: Path) -> np.ndarray:
    return load_volume(path).numpy()[0]


def header(path: Path) -> dict[str, bytes]:
    """Whatever says where the voxels lie, as it is in the file."""
    found = nibabel.load(path).header
    return {name: found[name].tobytes() for name in GEOMETRY}


@pytest.fixture(scope="module")
def head(phantom_dir) -> np.ndarray:
    """The voxels of a volume of the phantom."""
    return voxels(next((phantom_dir / "site_C/images").glob("*.nii.gz")))


def test_label_maps_are_those_that_the_evaluation_scores(run, slices, phantom_dir, tmp_path):
    """A site's folder: its test cases, whether or not their label maps are there."""
    site = Path(shutil.copytree(phantom_dir / "site_C", tmp_path / "elsewhere"))
    for label in (site / "labels").iterdir():
        label.unlink()
    out = tmp_path / "out"
    before = {path: path.stat().st_mtime_ns for folder in (slices, site) for path in folder.rglob("*")}
    code, printed, err = run("predict", "--model", slices, "--images", site, "--out", out)
    assert code == 0, err
    # Nothing is written but to --out.
    assert {p: p.stat().st_mtime_ns for folder in (slices, site) for p in folder.rglob("*")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "out"}
    scores = tmp_path / "scores.json"
    assert (
        run("evaluate", "--model", slices / "global_model.pt", "--data", phantom_dir, "--out", scores)[0] == 0
    )
    evaluated = json.loads(scores.read_text())["sites"]["site_C"]["cases"]
    assert len(evaluated) == 4
    told = predictions(out)
    assert told["cases"].keys() == evaluated.keys()
    trainer = FinishedRun.open(slices).trainer("site_C", phantom_dir, "cpu")
    folder = trainer.folder
    cases = {case.name: trainer.task.evaluation_case(folder, case) for case in folder.cases["test"]}
    trainer.network.eval()
    for name, dice in evaluated.items():
        predicted = voxels(out / f"{name}.nii.gz")
        seen = trainer.evaluation_transform()({"image": cases[name].image})["image"]
        scored = trainer.task.logits(trainer.network, seen).argmax(dim=0)
        np.testing.assert_array_equal(predicted, scored.numpy())
        assert 0 < (predicted == 1).sum() < predicted.size
        truth = voxels(phantom_dir / f"site_C/labels/{name}.nii.gz")
        assert dice_of(predicted, truth) == pytest.approx(dice, abs=1e-6)
        entry = told["cases"][name]
        edges = nibabel.load(out / f"{name}.nii.gz").header.get_zooms()
        assert entry["voxels"] == {"background": int((predicted == 0).sum()), "lesion": int(predicted.sum())}
        assert entry["volume_ml"]["lesion"] == pytest.approx(predicted.sum() * np.prod(edges) / 1000)
        assert f"{entry['volume_ml']['lesion']:.2f}" in printed
        assert Image.open(out / f"previews/{name}.png").size[0] == 700
    assert told["statistics"] is None
    assert told["model"]["run"] == json.loads((slices / "results.json").read_text())["run"]
    assert told["compared_with_the_sites"] == ["intensity", "spacing"]
    assert "recorded nothing" not in err
    assert not any("its voxels are" in text for entry in told["cases"].values() for text in entry["warnings"])


@pytest.mark.parametrize("options", [(), ("--site", "site_A")])
def test_turned_and_mirrored_volumes_have_turned_and_mirrored_label_maps(run, isotropic, tmp_path, options):
    """To the voxel: the plan brings all of them to one orientation and to cubes."""
    model, data = isotropic
    stored = nibabel.load(next((data / "site_A/images").glob("*.nii.gz")))
    image, affine = np.asarray(stored.dataobj), stored.affine
    images = tmp_path / "images"
    images.mkdir()
    turned = {}
    for axes, flips in zip(permutations(range(3)), product((False, True), repeat=3), strict=False):
        matrix = np.eye(4)
        matrix[:3, :3] = np.eye(3)[:, list(axes)]
        for axis, flip in enumerate(flips):
            if flip:
                matrix[:, 3] += matrix[:, axis] * (image.shape[axes[axis]] - 1)
                matrix[:3, axis] *= -1
        name = "".join(f"{axis}{'-' if flip else '+'}" for axis, flip in zip(axes, flips, strict=True))
        turned[name] = (axes, [axis for axis, flip in enumerate(flips) if flip])
        moved = np.flip(image.transpose(axes), turned[name][1])
        nibabel.save(nibabel.Nifti1Image(moved, affine @ matrix), images / f"{name}.nii.gz")
    out = tmp_path / "out"
    run.ok("predict", "--model", model, "--images", images, "--out", out, "--no-previews", *options)
    plain = voxels(out / "0+1+2+.nii.gz")
    assert 0.01 < (plain == 1).mean() < 0.99
    for name, (axes, flipped) in turned.items():
        np.testing.assert_array_equal(voxels(out / f"{name}.nii.gz"), np.flip(plain.transpose(axes), flipped))
        assert header(out / f"{name}.nii.gz") == header(images / f"{name}.nii.gz")
    assert not (out / "previews").exists()


def test_every_format_has_the_same_voxels_and_its_images_own_geometry(run, slices, head, tmp_path):
    images, out = tmp_path / "images", tmp_path / "out"
    written_as = {"d.mhd": "d.mha", "f.nhdr": "f.nrrd"}  # one file, with the voxels
    names = ["a.nii", "b.nii.gz", "c.mha", "d.mhd", "e.nrrd", "f.nhdr", "g_small.mha"]
    for name in names:
        write(images / name, head, AFFINE)
    run.ok("predict", "--model", slices, "--images", images, "--out", out, "--probabilities", "--no-previews")
    first = voxels(out / "a.nii")
    assert 0 < first.sum() < first.size
    for name in names:
        label = written_as.get(name, name)
        np.testing.assert_array_equal(voxels(out / label), first)
        shares = load_volume(out / "probabilities" / label).numpy()
        np.testing.assert_allclose(shares.sum(axis=0), 1, atol=1e-5)
        np.testing.assert_array_equal(shares.argmax(axis=0), first)
        for written in (out / label, out / "probabilities" / label):
            if ".nii" in name:
                assert header(written) == header(images / name)
                continue
            found, given = sitk.ReadImage(str(written)), sitk.ReadImage(str(images / name))
            for place in ("GetOrigin", "GetSpacing", "GetDirection"):
                assert getattr(found, place)() == pytest.approx(getattr(given, place)(), abs=1e-9)
    listed = {file for entry in predictions(out)["cases"].values() for file in entry["written"]}
    there = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert there == {*listed, "predictions.json", "predictions.html"}
    assert not list(out.rglob(".*"))


def test_oblique_volumes_keep_every_byte_of_their_geometry(run, slices, head, tmp_path):
    """Also where the two places that NIfTI has for it differ, or say nothing; nothing else is taken over."""
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    other = AFFINE.copy()
    other[:3, :3] = turn(-0.4, 0.3, 1.1) @ np.diag([0.9, 1.1, 2.5])
    for number, (sform, qform) in enumerate(product((0, 1, 4), (0, 2))):
        image = nibabel.Nifti1Image(head, AFFINE)
        image.set_sform(AFFINE, sform)
        image.set_qform(other, qform)
        image.header["descrip"] = b"Jane Doe"
        image.header["xyzt_units"] = 10
        image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"Jane Doe"))
        nibabel.save(image, images / f"{number}.nii")
    nibabel.save(nibabel.Nifti2Image(head, AFFINE), images / "second.nii")
    swapped = nibabel.Nifti1Image(head, AFFINE, nibabel.Nifti1Header(endianness=">"))
    nibabel.save(swapped, images / "swapped.nii")
    channels = nibabel.Nifti1Image(head[..., None], AFFINE)
    nibabel.save(channels, images / "channels.nii")
    run.ok("predict", "--model", slices, "--images", images, "--out", out, "--no-previews")
    for path in images.iterdir():
        assert header(out / path.name) == header(path)
        assert nibabel.load(out / path.name).shape == head.shape
        assert type(nibabel.load(out / path.name)) is type(nibabel.load(path))
        assert b"Jane" not in (out / path.name).read_bytes()
    silent = predictions(out)["cases"]["0"]
    assert "volume_ml" not in silent
    assert silent["voxels"]["lesion"] > 0


def test_a_bad_file_does_not_end_the_rest_and_a_second_call_goes_on(run, slices, head, tmp_path, monkeypatch):
    images, out = tmp_path / "images", tmp_path / "out"
    for name in ("a.nii", "c.nii"):
        write(images / name, head)
    write(images / "b.nii", head)
    (images / "b.nii").write_bytes((images / "b.nii").read_bytes()[:2000])
    write(images / "nan.nii", np.where(head > head.mean(), np.nan, head).astype(np.float32))
    write(images / "flat.nii", head[:, :, 0])
    Image.new("L", (20, 20)).save(images / "photograph.png")
    model = Path(shutil.copytree(slices, tmp_path / "earlier"))  # of a version that recorded no spacing
    record = json.loads((model / "results.json").read_text())
    del record["spacing"]
    (model / "results.json").write_text(json.dumps(record))
    arguments = ("predict", "--model", model, "--images", images, "--out", out, "--no-previews")
    code, printed, err = run(*arguments)
    assert code == 1
    failures = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert [line.split(": ")[1] for line in failures] == ["b", "flat", "nan", "photograph"]
    assert "NaN or infinite" in failures[2]
    assert "the model is for volumes" in failures[3]
    assert "2 cases in" in printed
    told = predictions(out)
    assert set(told["cases"]) == {"a", "c"}
    assert set(told["failed"]) == {"b", "flat", "nan", "photograph"}
    assert "pending" not in told

    before = (out / "a.nii").stat().st_mtime_ns
    for name in ("b.nii", "nan.nii", "flat.nii"):
        write(images / name, head + np.float32(len(name)))
    (images / "photograph.png").unlink()
    write(images / "c.nii", head * np.float32(0.5))  # another image of this name
    code, printed, err = run(*arguments)
    assert code == 0, err
    assert "1 of 5 cases are there already" in err
    assert (out / "a.nii").stat().st_mtime_ns == before
    assert len(predictions(out)["cases"]) == 5
    assert not predictions(out)["failed"]

    # A finished case whose image is damaged later leaves nothing behind that is in the way when it is mended.
    good = (images / "c.nii").read_bytes()
    (images / "c.nii").write_bytes(good[:2000])
    code, _, err = run(*arguments)
    assert code == 1
    assert set(predictions(out)["failed"]) == {"c"}
    assert not (out / "c.nii").exists()
    (images / "c.nii").write_bytes(good)
    code, _, err = run(*arguments)
    assert code == 0, err
    assert "4 of 5 cases are there already" in err
    assert (out / "c.nii").exists()

    # With nothing to do, what was said of all cases stays.
    told = predictions(out)
    assert told["notes"]
    assert run(*arguments)[0] == 0
    assert predictions(out) == told

    err = run.refused(*arguments, "--probabilities")
    assert "holds predictions with other options: probabilities (False, and now True)" in err
    assert "--overwrite" in err
    (out / "notes.txt").write_text("mine")
    run.ok(*arguments, "--probabilities", "--overwrite")
    assert (out / "a.nii").stat().st_mtime_ns != before
    assert (out / "notes.txt").read_text() == "mine"


def test_what_was_done_before_an_interruption_is_kept(run, slices, head, tmp_path, monkeypatch):
    for name in ("a.nii", "b.nii", "c.nii"):
        write(tmp_path / "images" / name, head)
    out, arguments = tmp_path / "out", ("predict", "--model", slices, "--images", tmp_path / "images")
    finish = Predictions.finished

    def stop(self, name, entry):
        finish(self, name, entry)
        if name == "b":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Predictions, "finished", stop)
        run(*arguments, "--out", out)
    told = predictions(out)
    assert set(told["cases"]) == {"a", "b"}
    assert set(told["pending"]) == {"c"}
    code, _, err = run(*arguments, "--out", out)
    assert code == 0
    assert "2 of 3 cases are there already" in err


def test_nothing_of_somebody_else_is_replaced(run, slices, head, tmp_path):
    images, out = tmp_path / "images", tmp_path / "out"
    write(images / "a.nii", head)
    arguments = ("predict", "--model", slices, "--images", images, "--no-previews")
    err = run.refused(*arguments, "--out", images)
    assert "holds the images" in err
    write(out / "a.nii", head)
    for more in ((), ("--overwrite",)):
        err = run.refused(*arguments, "--out", out, *more)
        assert f"{out / 'a.nii'} is not of an earlier prediction" in err
    np.testing.assert_array_equal(voxels(out / "a.nii"), head)
    # A folder for the results beside the images is no case.
    run.ok(*arguments, "--out", images / "predicted")
    assert run(*arguments, "--out", images / "predicted")[0] == 0


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ("nowhere", ["nowhere", "no such file or folder"]),
        ("empty", ["empty", "holds no image", "NIfTI", "dataset.json"]),
        ("notes.txt", ["notes.txt", "is not an image, by name", "DICOM"]),
        ("sites", ["sites", "holds several sites", "one site's folder"]),
        ("unlisted", ["dataset.json", "lists no test case"]),
        ("twice", ["image.nii.gz would both be predicted as q/image.nii.gz"]),
        ("formats", ["image.mha and ", "would both be predicted as q/image"]),
    ],
)
def test_what_cannot_be_predicted_is_one_line(run, slices, tmp_path, images, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no image")
    for folder in (tmp_path / "sites/A", tmp_path / "unlisted"):
        folder.mkdir(parents=True)
        (folder / "dataset.json").write_text('{"training": []}')
    for name, other in (("twice", tmp_path / "q/image.nii.gz"), ("formats", "q/image.mha")):
        (tmp_path / name).mkdir()
        listed = json.dumps({"test": [{"image": "q/image.nii.gz"}, {"image": str(other)}]})
        (tmp_path / name / "dataset.json").write_text(listed)
    out = tmp_path / "out"
    err = run.refused("predict", "--model", slices, "--images", tmp_path / images, "--out", out)
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert not out.exists()
    assert run("predict", "--model", slices, "--images", tmp_path, "--out", out, "--device", "abacus")[0] == 2
