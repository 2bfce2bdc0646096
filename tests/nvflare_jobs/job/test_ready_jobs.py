"""The job folders that are shipped are what the command writes today."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from medfedaug.nvflare_jobs.job.ready_jobs import EXECUTION, READY_JOBS

SHIPPED = Path(str(resources.files("medfedaug.nvflare_jobs"))) / "jobs"
AGAIN = "write them anew: make catalogue"
OPTIONS = {"methods": "--methods", "task": "--task", "rounds": "--rounds"} | {
    "classes": "--classes",
    "in_channels": "--channels",
    "image_size": "--image-size",
}


def files(job: Path) -> dict[str, str]:
    return {path.relative_to(job).as_posix(): path.read_text() for path in job.rglob("*") if path.is_file()}


def test_there_is_one_folder_for_each_entry_of_the_table():
    assert {path.name for path in SHIPPED.iterdir()} == set(READY_JOBS), AGAIN


@pytest.mark.parametrize("name", READY_JOBS)
def test_a_shipped_job_is_what_export_writes(run, tmp_path, name):
    arguments = []
    for field, value in READY_JOBS[name].items():
        arguments += [OPTIONS[field], ",".join(value) if isinstance(value, tuple) else value]
    arguments += ["--min-sites", EXECUTION.min_sites, "--round-timeout", EXECUTION.round_timeout]
    code, _, err = run("export", *arguments, "--out", tmp_path / name)
    assert code == 0, err
    assert files(SHIPPED / name) == files(tmp_path / name), AGAIN
