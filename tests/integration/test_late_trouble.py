"""Images that are unusable before a run, or turn out to be in it: `simulate` names them, and does without."""

import json

import numpy as np
import pytest
from benchmark_files import write_volume
from running import TINY_OPTIONS

from medfedaug.cli.console import RoundProgress

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


@pytest.fixture
def once_begun(monkeypatch):
    """`once_begun(act)`: act when a run tells its first event, as a disk does that fails during a run."""
    waiting = []
    show = RoundProgress.show

    def observe(self, event):
        show(self, event)
        while waiting:
            waiting.pop()()

    monkeypatch.setattr(RoundProgress, "show", observe)
    return waiting.append


def arguments(data, out, *extra):
    return [
        *("simulate", "--data", data, "--out", out, "--engine", "inprocess", "--device", "cpu"),
        *("--rounds", 3, "--batch-size", 4, "--threads", 1, "--no-report"),
        *TINY_OPTIONS,
        *extra,
    ]


@pytest.mark.parametrize("number", [TRAINING, VALIDATION, TEST])
def test_an_unusable_image_is_named_before_anything_starts(run, two_sites, tmp_path, number):
    path, _ = spoil(two_sites, number)
    out = tmp_path / "out"
    for engine in ("inprocess", "nvflare"):
        code, printed, err = run(*arguments(two_sites, out, "--methods", "fedavg"), "--engine", engine)
        assert code == 2
        assert err.splitlines()[-1] == f"medfedaug: site B, {path}: has NaN or infinite voxels."
        assert "round 1" not in printed + err
        assert not out.exists()


def test_a_site_whose_test_image_is_unusable_is_named_and_left_out_of_the_mean(
    run, two_sites, tmp_path, once_begun
):
    out, spoilt = tmp_path / "out", []
    once_begun(lambda: spoilt.append(spoil(two_sites, TEST)))
    for extra in ((), ("--resume",)):  # a finished run is shown
        code, printed, err = run(*arguments(two_sites, out, "--methods", "fedavg", *extra))
        assert code == 0, err
        ((path, before),) = spoilt
        assert f"B: not tested ({out}/results.json has the reason) and not in the mean" in err
        (row,) = (line for line in printed.splitlines() if "│ B " in line)
        assert "not tested" in row
        if not extra:
            assert "not tested: site B" in err
            assert f"{path}: has NaN or infinite voxels" in err
            path.write_bytes(before)  # mended
    test = json.loads((out / "results.json").read_text())["test"]
    assert set(test["sites"]) == {"A"}
    assert set(test["missing"]) == {"B"}
    assert test["mean"]["dice"] == test["sites"]["A"]["dice"]
    # What it says to do then.
    _, command = err.split("medfedaug evaluate ")
    code, printed, err = run("evaluate", *command.split())
    assert code == 0, err
    assert "not tested" not in printed
