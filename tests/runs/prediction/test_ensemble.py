"""`medfedaug predict` with several models: mean probabilities, and models that do not go together."""

import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
from finished_runs import balanced, simulated

from medfedaug.errors import ConfigError
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.prediction.ensemble import Ensemble


@pytest.fixture(scope="module")
def folds(tmp_path_factory, phantom_dir) -> Path:
    """Three runs as ``benchmark --folds`` leaves them; each has other cases, hence other statistics."""
    out = tmp_path_factory.mktemp("folds") / "fedrdn"
    for number in (1, 2, 3):
        run = out / f"fold={number}of3" / "seed-0"
        run.parent.mkdir(parents=True)
        simulated(phantom_dir, run, "fedrdn", "--limit", number, "--seed", number + 20)
        balanced(run, phantom_dir, "site_C")
    return out


@pytest.fixture(scope="module")
def images(tmp_path_factory, phantom_dir) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for file in sorted((phantom_dir / "site_C/images").iterdir())[:2]:
        shutil.copy(file, folder)
    return folder


def predicted(run, out: Path, images: Path, *options) -> dict:
    run.ok(*("predict", "--images", images, "--out", out, "--probabilities", "--no-previews", *options))
    return json.loads((out / "predictions.json").read_text())


def read(path: Path) -> np.ndarray:
    return np.asarray(nibabel.load(path).dataobj)


@pytest.mark.parametrize("site", [(), ("--site", "site_A")])
def test_probabilities_are_the_mean_of_the_models(run, folds, images, tmp_path, site):
    """The models alone, on disk, are the reference: mean and class are computed here in float64."""
    members = sorted(folds.glob("*/seed-0"))
    alone = [
        predicted(run, tmp_path / str(i), images, "--model", member, *site)
        for i, member in enumerate(members)
    ]
    together = predicted(run, tmp_path / "all", images, "--model", folds, *site)
    differs = 0
    for name, entry in together["cases"].items():
        shares = [
            read(tmp_path / f"{i}/probabilities/{name}.nii.gz").astype(float) for i in range(len(members))
        ]
        mean = np.mean(shares, axis=0)
        np.testing.assert_allclose(read(tmp_path / f"all/probabilities/{name}.nii.gz"), mean, atol=1e-6)
        label = read(tmp_path / f"all/{name}.nii.gz")
        clear = np.abs(mean[..., 0] - mean[..., 1]) > 1e-6
        np.testing.assert_array_equal(label[clear], mean.argmax(-1)[clear])
        assert 0.01 < (label == 1).mean() < 0.99
        assert entry["voxels"]["lesion"] == (label == 1).sum()
        differs += sum((read(tmp_path / f"{i}/{name}.nii.gz") != label).any() for i in range(len(members)))
    assert differs > 0  # or a single model would have passed
    known = {one["model"]["sha256"]: one["model"] for one in alone}
    assert {one["sha256"]: one for one in together["model"]["members"]} == known
    assert together["model"]["sha256"] not in known
    assert set(together["models"]) == {str(member) for member in members}
    if site:  # each with the pair that the site had in its fold
        pairs = sorted(one["statistics"]["mean"] for one in alone)
        assert sorted(one["mean"] for one in together["statistics"]["members"]) == pairs
        assert len({tuple(pair) for pair in pairs}) == 3
    else:
        assert together["statistics"] == alone[0]["statistics"]
        assert (tmp_path / "all/statistics.json").exists()


def test_the_order_of_models_changes_no_bit_and_a_call_goes_on(run, folds, images, tmp_path):
    first, second, third = sorted(folds.glob("*/seed-0"))
    out = tmp_path / "out"
    options = ("--model", third, "--model", first)
    predicted(run, out, images, *options)
    name = next(path.name for path in sorted(images.iterdir()))
    before = (out / name).read_bytes(), (out / "probabilities" / name).read_bytes()
    (out / name).unlink()  # predicted again
    predicted(run, out, images, "--model", first, "--model", third)
    assert ((out / name).read_bytes(), (out / "probabilities" / name).read_bytes()) == before
    err = run.refused(
        *("predict", "--model", first, "--model", second, "--images", images, "--out", out),
        *("--probabilities", "--no-previews"),
    )
    assert "holds predictions with other model" in err


def test_what_does_not_go_together_is_one_line(run, folds, images, tmp_path):
    first, second, _ = sorted(folds.glob("*/seed-0"))
    other = shutil.copytree(second, tmp_path / "other")
    content = json.loads((other / "results.json").read_text())
    content["config"]["plan"]["overlap"] = 0.25
    (other / "results.json").write_text(json.dumps(content))
    empty = tmp_path / "empty"
    empty.mkdir()
    for models, words in {
        (first, other): f"{other} and {first} differ in plan: overlap (0.25, and 0.5)",
        (first, first / "global_model.pt"): "is the same model as",
        (empty,): "no finished run",
    }.items():
        named = [word for model in models for word in ("--model", model)]
        err = run.refused("predict", *named, "--images", images, "--out", tmp_path / "out")
        assert words in err.replace("\n", " ")
        assert "Traceback" not in err
    assert not (tmp_path / "out/predictions.json").exists()


def test_a_plan_that_each_fold_made_of_its_own_data_may_differ(folds):
    """Runs with ``--plan auto`` asked for the same, and a fold may have another median spacing."""
    runs = [FinishedRun.open(path) for path in sorted(folds.glob("*/seed-0"))[:2]]
    for run, overlap in zip(runs, (0.5, 0.25), strict=True):
        run.record["planned"] = {"asked": dict(run.record["config"])}
        run.record["config"] = {**run.record["config"], "plan": {"overlap": overlap}}
    assert len(Ensemble.of(runs).runs) == 2
    runs[1].record["planned"]["asked"]["rounds"] = 7
    with pytest.raises(ConfigError, match=r"differ in rounds \(7, and 1\)"):
        Ensemble.of(runs)
