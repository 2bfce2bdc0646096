"""Names that scripts of earlier releases import."""

from __future__ import annotations

import subprocess
import sys

import medfedaug.simulate
from medfedaug.experiments import simulate


def test_simulate_is_that_of_the_experiments():
    for name in simulate.__all__:
        assert getattr(medfedaug.simulate, name) is getattr(simulate, name)
    assert medfedaug.simulate.__all__ == simulate.__all__


def test_the_earlier_name_of_finished_runs_warns_and_says_the_new_one():
    script = "from medfedaug.finished import FinishedRun; print(FinishedRun.__module__)"
    command = [sys.executable, "-W", "always::DeprecationWarning", "-c", script]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "medfedaug.runs.finished_run"
    assert "DeprecationWarning: import FinishedRun from medfedaug.runs.finished_run" in done.stderr
