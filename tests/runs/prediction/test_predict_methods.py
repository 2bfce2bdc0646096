"""`medfedaug predict` with what methods need, on photographs, and on images unlike the federation's."""

import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
from finished_runs import FEW, balanced, dice_of, simulated
from PIL import Image
from written_volumes import load_volume

from medfedaug.data.io.photographs import FORMAT as PHOTOGRAPHS
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import open_site, site_statistics
from medfedaug.federation.site.state import RoundMemory
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.privacy import PrivacyLedger
from medfedaug.hospital.privacy.guard import PrivacyGuard
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.statistics import load_statistics

STATISTICS = "statistics.json"


def predictions(out: Path) -> dict:
    return json.loads((out / "predictions.json").read_text())


def maps(out: Path) -> dict[str, np.ndarray]:
    return {
        name: load_volume(out / entry["label_map"]).numpy()
        for name, entry in predictions(out)["cases"].items()
    }


@pytest.fixture(scope="module")
def normalised(tmp_path_factory, phantom_dir) -> Path:
    """A run that normalises with the site's statistics, and leaves running statistics at the sites."""
    out = tmp_path_factory.mktemp("run") / "run"
    run = simulated(phantom_dir, out, "fedrdn,silobn", *FEW, "--set", "silobn.unseen=average")
    return balanced(run, phantom_dir, "site_A")


def scores(run, model: Path, data: Path, site: str, out: Path) -> dict[str, float | None]:
    assert run("evaluate", "--model", model / "global_model.pt", "--data", data, "--out", out)[0] == 0
    return json.loads(out.read_text())["sites"][site]["cases"]


def assert_scored_alike(out: Path, truth: Path, expected: dict[str, float | None]) -> None:
    found = maps(out)
    assert found.keys() == expected.keys()
    for name, predicted in found.items():
        dice = dice_of(predicted[0], load_volume(truth / f"labels/{name}.nii.gz").numpy()[0])
        assert dice == pytest.approx(expected[name], abs=1e-6)


@pytest.mark.parametrize("site", ["site_A", "site_C"])
def test_own_statistics_and_layers_and_those_of_a_place_that_never_trained(
    run, normalised, phantom_dir, tmp_path, site
):
    """As the evaluation has them: site_A those that it keeps, site_C, unseen, those of the images given."""
    expected = scores(run, normalised, phantom_dir, site, tmp_path / "scores.json")
    own = ("--site", site) if site == "site_A" else ()
    out = tmp_path / "out"
    arguments = ("predict", "--model", normalised, "--images", phantom_dir / site, "--no-previews")
    run.ok(*arguments, "--out", out, *own)
    assert_scored_alike(out, phantom_dir / site, expected)
    used = predictions(out)["statistics"]
    recorded = load_statistics(normalised / STATISTICS)["site_A"]
    if not own:
        recorded = site_statistics(open_site(phantom_dir / site), "scale")
    assert used["mean"] == pytest.approx(recorded.mean.tolist())
    assert used["std"] == pytest.approx(recorded.std.tolist())
    if own:
        assert used["of"] == "site site_A"
        assert not (out / STATISTICS).exists()
        return
    assert used["of"] == f"the {len(expected)} images given"
    # What these statistics are, later images can be normalised with, too.
    one = tmp_path / "one"
    case = phantom_dir / site / f"images/{next(iter(expected))}.nii.gz"
    run.ok(
        *("predict", "--model", normalised, "--images", case, "--out", one, "--statistics", out / STATISTICS),
        "--no-previews",
    )
    assert predictions(one)["statistics"]["mean"] == used["mean"]
    assert predictions(one)["statistics"]["of"] == str(out / STATISTICS)
    # Another set of images has other statistics, and is not mixed with the first.
    (tmp_path / "few").mkdir()
    shutil.copy2(case, tmp_path / "few")
    code, _, err = run(
        *("predict", "--model", normalised, "--images", tmp_path / "few", "--out", out, "--no-previews")
    )
    assert code == 0, err  # all of them are there
    case = next((phantom_dir / "site_B/images").glob("*.nii.gz"))
    shutil.copy(case, tmp_path / "few/new.nii.gz")
    err = run.refused(
        *("predict", "--model", normalised, "--images", tmp_path / "few", "--out", out, "--no-previews")
    )
    assert f"other statistics: of (the {len(expected)} images given, and now the 2 images given)" in err
    assert load_statistics(out / STATISTICS)["images"].count == len(expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--site", "nowhere"), ["'nowhere' took no part", "site_A, site_B"]),
        (("--site", "site_A", "--statistics", STATISTICS), ["exclude each other"]),
        (("--statistics", STATISTICS), ["expected one site, found site_A, site_B"]),
        (("--statistics", "nothing.json"), ["nothing.json", "No such file"]),
        (("--site", "site_A", "--state", "elsewhere"), ["left layers", "has none", "--state"]),
        (("--statistics", "raw.json"), ["raw.json", "raw images, not of scale"]),
        (("--statistics", "two.json"), ["has 2 channels", "the model expects 1"]),
    ],
)
def test_what_a_method_lacks_is_one_line_that_says_what_to_give(
    run, normalised, phantom_dir, tmp_path, monkeypatch, options, words
):
    monkeypatch.chdir(tmp_path)
    shutil.copy(normalised / STATISTICS, tmp_path)
    pair = {"format": "medfedaug.statistics", "version": 1}
    for name, channels, intensity in (("raw.json", 1, "raw"), ("two.json", 2, "scale")):
        one = {"mean": [0.5] * channels, "std": [0.1] * channels, "count": 3}
        Path(name).write_text(json.dumps({**pair, "intensity": intensity, "sites": {"x": one}}))
    images = next((phantom_dir / "site_A/images").glob("*.nii.gz"))
    err = run.refused("predict", "--model", normalised, "--images", images, "--out", "out", *options)
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert not Path("out").exists()


def test_layers_that_sites_keep_come_from_the_run_or_from_a_kit(
    run, fedbn_model, phantom_dir, tmp_path, monkeypatch
):
    model = shutil.copytree(fedbn_model, tmp_path / "run")
    arguments = ("predict", "--model", model, "--images", phantom_dir / "site_B", "--no-previews")
    err = run.refused(*arguments, "--out", tmp_path / "out")
    assert "layers of the model stay at the sites; name one with --site (site_A, site_B" in err
    assert run(*arguments, "--out", tmp_path / "out", "--site", "site_B")[0] == 0
    kit = tmp_path / "kit"
    for folder in ("local", "startup"):
        (kit / folder).mkdir(parents=True)
    shutil.move(model / "state", kit / "medfedaug")
    run.ok(*arguments, "--out", tmp_path / "again", "--site", "site_B", "--state", kit)
    for name, found in maps(tmp_path / "out").items():
        np.testing.assert_array_equal(found, maps(tmp_path / "again")[name])
    assert any("of site site_B are used" in note for note in predictions(tmp_path / "again")["notes"])
    # So do the other commands that need them.
    bundle = ("bundle", model, "--site", "site_B", "--out")
    assert run(*bundle, tmp_path / "none")[0] == 2
    assert run(*bundle, tmp_path / "bundle", "--state", kit)[0] == 0
    evaluate = ("evaluate", "--model", model, "--data", phantom_dir / "site_B", "--device", "cpu", *FEW)
    assert run(*evaluate)[0] == 2
    assert run(*evaluate, "--state", kit)[0] == 0
    monkeypatch.setenv("MEDFEDAUG_STATE", str(kit / "medfedaug"))
    assert run(*evaluate)[0] == 0


def test_prediction_opens_no_ledger_and_keeps_no_rounds(run, fedbn_model, phantom_dir, tmp_path, monkeypatch):
    def never(self, *args, **kwargs):
        raise AssertionError(f"prediction has no use for {type(self).__name__}")

    for part in (PrivacyGuard, PrivacyLedger, RoundMemory, SiteTrainer):
        monkeypatch.setattr(part, "__init__", never)
    images = ("--images", phantom_dir / "site_B", "--site", "site_B", "--no-previews")
    run.ok("predict", "--model", fedbn_model, *images, "--out", tmp_path / "out")
    run.ok("bundle", fedbn_model, "--site", "site_B", "--out", tmp_path / "bundle")


def test_an_image_unlike_the_federations_is_named_with_how_far(run, tmp_path):
    data = tmp_path / "data"
    make_phantom(data, sites=2, patients=3, spacings=[(8, 8, 8), (10, 10, 10)], seed=0)
    volumes = ("--spatial-dims", 3, "--patch-size", "16,16,16", "--patches-per-volume", 4)
    model = simulated(data, tmp_path / "run", "fedrdn", "--plan", "auto", *volumes)
    known = nibabel.load(next((data / "site_A/images").glob("*.nii.gz")))
    voxels = np.asarray(known.dataobj).astype(np.float32)
    images = tmp_path / "images"
    images.mkdir()
    nibabel.save(known, images / "alike.nii")
    thick = known.affine @ np.diag([1, 1, 3, 1])
    nibabel.save(nibabel.Nifti1Image(voxels, thick), images / "thick.nii")
    nibabel.save(nibabel.Nifti1Image(voxels.max() - voxels, known.affine), images / "bright.nii")
    code, _, err = run(
        *("predict", "--model", model, "--images", images, "--out", tmp_path / "out", "--site", "site_A"),
        "--no-previews",
    )
    assert code == 0, err
    told = predictions(tmp_path / "out")
    assert told["compared_with_the_sites"] == ["intensity", "spacing"]
    found = {name: entry["warnings"] for name, entry in told["cases"].items()}
    assert found["alike"] == []
    assert found["thick"] == [
        "its voxels are 8 x 8 x 24 mm, a factor of 2.4 outside the sites' 8 x 8 x 8 to 10 x 10 x 10 mm"
    ]
    pairs = load_statistics(model / STATISTICS).values()
    scaled = (voxels.max() - voxels) / (voxels.max() - voxels.min())
    highest, spread = max(float(p.mean[0]) for p in pairs), np.mean([float(p.std[0]) for p in pairs])
    far = (scaled.mean() - highest) / spread
    assert far > 1
    assert f"{far:.1f} standard deviations outside the sites'" in found["bright"][0]
    assert f"thick: unlike the federation's images: {found['thick'][0]}" in err
    assert "recorded nothing" not in err
    # A run with neither file nor plan nor spacing says so once.
    (model / STATISTICS).unlink()
    record = json.loads((model / "results.json").read_text())
    (model / "results.json").write_text(
        json.dumps({k: v for k, v in record.items() if k not in ("planned", "spacing")})
    )
    code, _, err = run(
        "predict", "--model", model, "--images", images, "--out", tmp_path / "unknown", "--no-previews"
    )
    assert code == 0
    assert err.count("recorded nothing of its sites' intensity and spacing") == 1


@pytest.mark.parametrize("bits", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_photographs_have_label_images(run, make_pictures, tmp_path, bits):
    channels = 3 if bits == 8 else 1
    for name in "AB":
        make_pictures(name, channels=channels, size=(40, 32), bits=bits)
    data = tmp_path / "pictures"
    model = balanced(simulated(data, tmp_path / "run", "fedrdn"), data, "B")
    expected = scores(run, model, data, "B", tmp_path / "scores.json")
    out = tmp_path / "out"
    code, printed, err = run(
        *("predict", "--model", model, "--images", data / "B", "--out", out, "--site", "B", "--probabilities")
    )
    assert code == 0, err
    assert "(pixels)" in printed
    assert "recorded nothing of its sites" not in err  # photographs have no spacing
    for name, dice in expected.items():
        label = Image.open(out / f"{name}.png")
        assert (label.mode, label.size) == ("L", (40, 32))
        truth = PHOTOGRAPHS.read_label(data / f"B/labels/{name}.png")
        found = PHOTOGRAPHS.read_label(out / f"{name}.png")
        assert 0 < found.sum() < found.size
        assert dice_of(found, truth) == pytest.approx(dice, abs=1e-6)
        shares = [np.asarray(Image.open(out / f"probabilities/{name}_{k}.png")).astype(float) for k in (0, 1)]
        np.testing.assert_allclose(sum(shares), 65535, atol=1.5)
        np.testing.assert_array_equal(shares[1] > shares[0], np.asarray(label) == 1)
        assert "volume_ml" not in predictions(out)["cases"][name]


def test_photographs_are_classified(run, make_photos, tmp_path):
    for name in "AB":
        make_photos(name)
    data = tmp_path / "photos"
    model = simulated(data, tmp_path / "run", "fedavg", "--network", "lenet5")
    images = tmp_path / "new"
    shutil.copytree(data / "B/cat", images / "some")
    shutil.copy(data / "B/dog/0.png", images / "alone.png")
    (images / "broken.png").write_bytes(b"no picture")
    out = tmp_path / "out"
    code, _, err = run("predict", "--model", model, "--images", images, "--out", out)
    assert code == 1
    assert [line for line in err.splitlines() if line.startswith("failed: broken")]
    told = predictions(out)["cases"]
    assert set(told) == {"alone", *(f"some/{i}" for i in range(5))}
    finished = FinishedRun.open(model)
    trainer = finished.trainer("B", data / "B", "cpu")
    trainer.network.eval()
    for case in (case for cases in trainer.folder.cases.values() for case in cases):
        name = "alone" if case.name == "dog/0.png" else f"some/{Path(case.name).stem}"
        if case.label == "dog" and name != "alone":
            continue
        (shares,) = trainer.network(trainer.folder.load_image(case, "scale")[None]).softmax(dim=1)
        assert list(told[name]["probabilities"].values()) == pytest.approx(shares.tolist(), abs=1e-5)
        assert told[name]["class"] == ("cat", "dog")[int(shares.argmax())]
        assert (out / f"previews/{name}.png").exists()
    volume = nibabel.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4))
    nibabel.save(volume, tmp_path / "volume.nii")
    code, _, err = run("predict", "--model", model, "--images", tmp_path / "volume.nii", "--out", out)
    assert code == 1
    assert "is no photograph, and the model is for photographs" in err
