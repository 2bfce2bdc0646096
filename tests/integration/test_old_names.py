"""Names that scripts, jobs and kits of earlier releases use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from nvflare.fuel.utils.class_utils import load_class

from medfedaug.experiments import one_run, simulate


def test_simulate_is_that_of_the_experiments():
    face = import_module("medfedaug.simulate")
    for name in ("check_device", "configure"):
        assert getattr(face, name) is getattr(simulate, name)
    assert face.simulate is one_run.simulate
    assert face.__all__ == simulate.__all__


@pytest.mark.parametrize(
    "path",
    [
        "controller.FederationController",
        "evaluation.EvaluationController",
        "evaluation.EvaluationExecutor",
        "executor.SiteExecutor",
        "launcher.RestartingLauncher",
        "loop.ScriptLoop",
        "tracking.RoundMetrics",
        "app_validator.JsonAppValidator",
        "kit_status.KitStatus",
        "lost_jobs.LostJobs",
        "rejoin.JobRejoiner",
        "startup.CertificateWatch",
    ],
)
def test_the_class_paths_of_jobs_and_kits_of_earlier_releases_are_found(path):
    loaded = load_class(f"medfedaug.nvflare_jobs.{path}")
    assert loaded.__module__ == f"medfedaug.nvflare_jobs.{path.partition('.')[0]}"


def test_a_process_of_a_kit_finds_a_class_by_its_path_before_anything_else_is_imported():
    script = (
        "from nvflare.fuel.utils.class_utils import load_class; import sys; "
        "found = load_class('medfedaug.nvflare_jobs.launcher.RestartingLauncher'); "
        "from medfedaug.nvflare_jobs.kit.launcher import RestartingLauncher; "
        "assert found is RestartingLauncher and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
