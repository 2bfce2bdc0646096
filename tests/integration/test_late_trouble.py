"""Images that turn out to be unusable during a run: `simulate` names them, and what it did without."""

from __future__ import annotations

import json

import numpy as np
import pytest
from benchmark_files import write_volume
from running import TINY_NETWORK, TINY_OPTIONS

from medfedaug.config.run import RunConfig
from medfedaug.experiments.simulate import simulate
from medfedaug.methods import parse_methods

TRAINING, VALIDATION, TEST = 0, 2, 3  # the images of `make_site`


@pytest.fixture
def two_sites(make_site, tmp_path):
    for name in "AB":
        make_site(name)
    return tmp_path / "data"


def spoil(data, number):
    """Make a voxel of an image of site B NaN, which nothing but reading all of it shows."""
    path = data / f"B/images/{number}.nii.gz"
    before = path.read_bytes()
    voxels = np.random.default_rng(0).normal(100, 20, (16, 16, 4)).astype(np.float32)
    voxels[3, 3, 1] = np.nan
    write_volume(path, voxels)
    return path, before


def arguments(data, out, *extra):
    return [
        *("simulate", "--data", data, "--out", out, "--engine", "inprocess", "--device", "cpu"),
        *("--rounds", 3, "--batch-size", 4, "--threads", 1, "--no-report"),
        *TINY_OPTIONS,
        *extra,
    ]


def test_a_site_whose_test_image_is_unusable_is_named_and_left_out_of_the_mean(run, two_sites, tmp_path):
    out = tmp_path / "out"
    path, before = spoil(two_sites, TEST)
    for extra in ((), ("--resume",)):  # a finished run is shown
        code, printed, err = run(*arguments(two_sites, out, "--methods", "fedavg", *extra))
        assert code == 0, err
        assert f"B: not tested ({out}/results.json has the reason) and not in the mean" in err
        (row,) = (line for line in printed.splitlines() if "│ B " in line)
        assert "not tested" in row
        if not extra:
            assert "not tested: site B" in err
            assert f"{path}: has NaN or infinite voxels" in err
    test = json.loads((out / "results.json").read_text())["test"]
    assert set(test["sites"]) == {"A"}
    assert set(test["missing"]) == {"B"}
    assert test["mean"]["dice"] == test["sites"]["A"]["dice"]
    # What it says to do then.
    path.write_bytes(before)
    _, command = err.split("medfedaug evaluate ")
    code, printed, err = run("evaluate", *command.split())
    assert code == 0, err
    assert "not tested" not in printed


def test_pooled_training_does_without_a_site_that_cannot_be_validated(run, two_sites, tmp_path):
    path, before = spoil(two_sites, VALIDATION)
    out, pooled = tmp_path / "out", ("--methods", "pooled")
    code, _, err = run(*arguments(two_sites, out, *pooled))
    assert code == 2
    said = err.splitlines()[-1]
    assert "round 2: 1 of 2 needed updates could be used" in said
    assert f"site B, {path}: has NaN or infinite voxels" in said
    # Its training images are there all the same.
    fewer = tmp_path / "fewer"
    code, _, err = run(*arguments(two_sites, fewer, *pooled, "--min-sites", 1))
    assert code == 0, err
    results = json.loads((fewer / "results.json").read_text())
    assert [{trouble["site"] for trouble in entry["refused"]} for entry in results["rounds"]] == [
        set(),
        {"B"},
        {"B"},
    ]
    assert all(entry["sites"]["A"]["samples"] for entry in results["rounds"])
    assert "val_dice" not in results["rounds"][1]["sites"].get("B", {})
    # Mended, the run goes on where it broke off, and gives what it would have given.
    path.write_bytes(before)
    code, _, err = run(*arguments(two_sites, out, *pooled, "--resume"))
    assert code == 0, err
    assert "resumed after round 1" in err
    config = RunConfig(methods=tuple(parse_methods("pooled")), **TINY_NETWORK, rounds=3, batch_size=4)
    whole = simulate(two_sites, tmp_path / "whole", config, device="cpu", report=False)
    assert json.loads((out / "results.json").read_text())["test"] == json.loads(json.dumps(whole["test"]))
