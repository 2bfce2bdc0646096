"""A Bundle that only infers, as many in MONAI's zoo: its training is written by a command, and then runs."""

from __future__ import annotations

import json

import bundles
import pytest
import torch
from monai.bundle import ConfigParser

from medfedaug.data.datasets.phantom import make_phantom


def inferring(folder, **changes):
    """A Bundle with ``configs/inference.json`` alone, as `spleen_ct_segmentation` has it."""
    written = bundles.volumes()
    image = [
        bundles.target("LoadImaged", keys="@image_key"),
        bundles.target("EnsureChannelFirstd", keys="@image_key"),
        bundles.target("Orientationd", keys="@image_key", axcodes="RAS"),
        bundles.target("Spacingd", keys="@image_key", pixdim=[1.0, 1.0, 3.0], mode="bilinear"),
        bundles.target("Resized", keys="@image_key", spatial_size=[24, 24, 8]),
        bundles.target("ScaleIntensityd", keys="@image_key"),
        bundles.target("Lambdad", keys="@image_key", func="$lambda x: x * 2"),
    ]
    content = {
        "image_key": "image",
        "bundle_root": ".",
        "network_def": written["network_def"],
        "network": "$@network_def.to(@device)",
        "device": "$torch.device('cuda:0')",
        "preprocessing": bundles.target("Compose", transforms=image),
        "inferer": bundles.target("SlidingWindowInferer", roi_size=[16, 16, 8], sw_batch_size=2),
        "evaluator": bundles.target("SupervisedEvaluator"),
        "run": ["$@evaluator.run()"],
        **changes,
    }
    (folder / "configs").mkdir(parents=True)
    (folder / "configs/inference.json").write_text(json.dumps(content))
    return folder


def test_a_bundle_that_only_infers_is_refused_with_the_command_whose_training_runs(run, tmp_path):
    data, bundle = tmp_path / "data", inferring(tmp_path / "spleen")
    make_phantom(data, sites=2, patients=4, shape=(24, 24, 8), seed=0)
    train = ["simulate", "--bundle", bundle, "--data", data, "--methods", "fedrdn,fedfa", "--rounds", 1]
    train += ["--engine", "inprocess", "--no-report", "--out", tmp_path / "run"]
    code, _, err = run(*train)
    assert code == 2
    assert f"medfedaug bundle --add-training {bundle}" in " ".join(err.split())

    code, out, err = run("bundle", "--add-training", bundle)
    assert code == 0, err
    assert "Lambdad" in out
    assert "configs/train.json" in out.replace("\n", "")
    written = (bundle / "configs/train.json").read_text()
    code, _, err = run(*train)
    assert code == 0, err
    assert 0 <= json.loads((tmp_path / "run/results.json").read_text())["test"]["mean"]["mean_dice"] <= 1

    code, _, err = run("bundle", "--add-training", bundle)
    assert code == 2
    assert "has a training" in err
    assert (bundle / "configs/train.json").read_text() == written


def test_image_and_label_are_prepared_alike_but_for_intensities(run, tmp_path):
    bundle = inferring(tmp_path / "spleen")
    assert run("bundle", "--add-training", bundle)[0] == 0
    make_phantom(tmp_path / "data", sites=1, patients=3, shape=(20, 20, 6), seed=0)
    parser = ConfigParser(ConfigParser.load_config_file(str(bundle / "configs/train.json")))
    parser["dataset_dir"], parser["device"] = str(tmp_path / "data/site_A"), "cpu"
    (sample,) = parser.get_parsed_content("validate#dataset")
    assert sample["image"].shape == sample["label"].shape == (1, 24, 24, 8)
    assert set(torch.unique(sample["label"]).tolist()) <= {0, 1}
    assert sample["image"].max() == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"network_def": {"_target_": "UNet", "out_channels": 1}}, "at least 2 classes, got 1"),
        ({"network_def": {"_target_": "UNet"}}, "out_channels"),
        ({"network_def": "@net"}, "network_def with out_channels"),
        ({"preprocessing": ["LoadImaged"]}, "preprocessing with transforms"),
        ({"preprocessing": {"transforms": "@steps"}}, "preprocessing with transforms"),
    ],
)
def test_an_inference_of_another_form_is_refused_and_nothing_is_written(change, reason, run, tmp_path):
    bundle = inferring(tmp_path / "spleen", **change)
    code, _, err = run("bundle", "--add-training", bundle)
    assert code == 2
    assert reason in " ".join(err.split())
    assert not (bundle / "configs/train.json").exists()


def test_a_folder_without_an_inference_is_refused_without_a_command(run, tmp_path):
    for command in (["--add-training"], ["--add-training", tmp_path / "none", "--model"]):
        assert run("bundle", *command, tmp_path / "none")[0] == 2
    (tmp_path / "none").mkdir()
    train = ["--data", tmp_path, "--out", tmp_path / "run"]
    code, _, err = run("simulate", "--bundle", tmp_path / "none", *train)
    assert code == 2
    assert "--add-training" not in err
