"""Every benchmark script runs, at sizes that measure nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
}


@pytest.mark.parametrize("script", RUNS)
def test_the_script_runs(script):
    arguments, expected = RUNS[script]
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert "1 thread(s)" in done.stdout.splitlines()[0]


def test_none_is_left_out():
    assert set(RUNS) | {"measure.py", "nvflare_round.py"} == {p.name for p in FOLDER.glob("*.py")}
