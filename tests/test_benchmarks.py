"""Every benchmark script runs, at sizes that measure nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_files import write_lgg

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"

RUNS = {
    "ffa_layer.py": (["--tiny", "--repeats", "2"], "FFA / batch norm"),
    "unet_step.py": (
        ["--network", "default", "--batch", "2", "--size", "32", "--repeats", "1"],
        "FFA + alignment / plain",
    ),
    "fedrdn_transform.py": (["--tiny", "--repeats", "2"], "FedRDNd / NormalizeIntensityd"),
    "statistics_pass.py": (
        ["--shape", "16", "16", "2", "--patients", "3", "--repeats", "1"],
        "statistics / reading",
    ),
    "fedfd_step.py": (["--batch", "2", "--size", "32", "--repeats", "1"], "FedFD-A / FedAvg"),
    "aggregation.py": (["--sites", "2", "3"], "3 sites"),
    "augmentation.py": (["--tiny", "--repeats", "2"], "image by image / batch at once"),
    "precision.py": (["--tiny", "--repeats", "2"], "float32 / bfloat16"),
}


@pytest.mark.parametrize("script", RUNS)
def test_the_script_runs(script):
    arguments, expected = RUNS[script]
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert "1 thread(s)" in done.stdout.splitlines()[0]


def test_accuracy_against_epsilon_runs(phantom_dir, tmp_path):
    options = ["--rounds", "1", "--features", *["4"] * 6, "--seeds", "0", "--epsilon", "8", "--draws", "2"]
    command = [sys.executable, str(FOLDER / "privacy_epsilon.py"), "--data", str(phantom_dir)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--halve", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| fedfa | clipped | 0.00 |" in done.stdout
    assert (tmp_path / "epsilon.png").exists()
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert [r["level"] for r in numbers["runs"]] == ["none", "none", "none", "clipped", "clipped", "8", "8"]
    assert all(7.9 < e <= 8 for r in numbers["runs"][-2:] for e in r["epsilon"].values())


def test_the_time_of_a_protocol_is_measured(tmp_path):
    write_lgg(tmp_path / "lgg_multisite")
    small = ["--set", 'network_args={"features": [4, 4, 4, 4, 4, 4]}', "--precision", "bfloat16"]
    command = [sys.executable, str(FOLDER / "protocol.py"), "lgg_multisite", "--data", str(tmp_path)]
    done = subprocess.run([*command, *small, "--rounds", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a round" in done.stdout
    assert "the protocol's 100 rounds" in done.stdout


def test_none_is_left_out():
    apart = {"measure.py", "nvflare_round.py", "privacy_epsilon.py", "protocol.py"}
    assert set(RUNS) | apart == {p.name for p in FOLDER.glob("*.py")}
