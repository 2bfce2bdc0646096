"""More than 256 classes, whose labels do not fit into a byte: read, trained on, scored, written."""

import json

import numpy as np
import pytest
import torch
from finished_runs import rehashed, simulated
from monai.bundle import run as run_bundle
from PIL import Image
from written_volumes import load_label, write

from medfedaug.data.sites import find_sites

CLASSES = 300
LABELS = [0, 44, 256, 299]
KINDS = {
    "volumes": ("nii.gz", ("--spatial-dims", 3, "--spacing", "1,1,1", "--patch-size", "16,16,16")),
    "slices": ("nii.gz", ("--augmentation", "flip_rotate")),
    "photographs": ("png", ("--image-size", 24)),
}


@pytest.fixture
def make_many(tmp_path):
    """Two sites of which each label map has the classes of LABELS: `make_many("png")`."""

    def make(suffix: str):
        for name in "AB":
            folder = tmp_path / "data" / name
            rng = np.random.default_rng(sum(name.encode()))
            content: dict = {"labels": {str(i): f"class {i}" for i in range(CLASSES)}}
            for index, split in enumerate(("training", "validation", "test")):
                label = np.zeros((16, 16, 4), np.uint16)
                for row, value in zip((1, 6, 11), LABELS[1:], strict=True):
                    label[row : row + 4, 3:9] = value
                image = (label + rng.integers(0, 50, label.shape)).astype(np.uint16)
                for kind, voxels in (("images", image), ("labels", label)):
                    path = folder / f"{kind}/{index}.{suffix}"
                    if suffix == "png":
                        path.parent.mkdir(parents=True, exist_ok=True)
                        Image.fromarray(voxels[..., 0]).save(path)
                    else:
                        write(path, voxels)
                content[split] = [{key: f"{key}s/{index}.{suffix}" for key in ("image", "label")}]
            (folder / "dataset.json").write_text(json.dumps(content))
        return tmp_path / "data"

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_labels_above_255_are_trained_on_scored_and_written(run, make_many, tmp_path, kind):
    suffix, options = KINDS[kind]
    data = make_many(suffix)
    site = find_sites(data)[0]
    _, label = site.load_case(site.cases["training"][0])
    assert label.unique().tolist() == LABELS

    model = simulated(data, tmp_path / "run", "fedavg", *options)
    weights = torch.load(model / "global_model.pt", weights_only=True)
    weights["model.2.conv.bias"][299] += 100  # the one class that it says
    torch.save(weights, model / "global_model.pt")
    rehashed(model)
    out, scores, bundle = tmp_path / "out", tmp_path / "scores.json", tmp_path / "bundle"
    code, _, err = run("predict", "--model", model, "--images", data / "A", "--out", out)
    assert code == 0, err
    predicted = load_label(out / f"2.{suffix}")
    assert predicted.unique().tolist() == [299]
    code, _, err = run("evaluate", "--model", model / "global_model.pt", "--data", data, "--out", scores)
    assert code == 0, err
    scored = json.loads(scores.read_text())["sites"]["A"]["classes"]
    share = float((label == 299).float().mean())
    assert scored["class 299"]["dice"] == pytest.approx(2 * share / (1 + share))
    assert scored["class 256"]["dice"] == scored["class 44"]["dice"] == 0

    code, _, err = run("bundle", model, "--out", bundle)
    assert code == 0, err
    run_bundle(
        config_file=str(bundle / "configs/inference.json"),
        meta_file=str(bundle / "configs/metadata.json"),
        bundle_root=str(bundle),
        dataset_dir=str(data / "A/images"),
        output_dir=str(tmp_path / "bundled"),
    )
    assert torch.equal(load_label(tmp_path / f"bundled/2.{suffix}"), predicted)
