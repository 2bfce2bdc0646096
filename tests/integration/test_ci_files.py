"""The versions that are promised are those that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from tried_versions import pins, tried

ROOT = Path(__file__).resolve().parents[2]
CI = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
MATRIX = CI["versions"]["strategy"]["matrix"]["include"]
PROJECT = (ROOT / "pyproject.toml").read_text()


def steps(job: str) -> str:
    return "\n".join(step.get("run", "") for step in CI[job]["steps"])


def test_the_newest_job_runs_ci_run_with_the_first_row_of_the_table():
    newest = tried()[0]
    versions = [step["with"]["python-version"] for step in CI["newest"]["steps"] if "with" in step]
    assert versions == [newest["Python"]]
    assert "bash .ci/run" in steps("newest")
    torch = newest["PyTorch"].split(",")[0]
    assert f"torch=={torch}" in (ROOT / "Makefile").read_text()
    assert pins("deploy/cpu.txt") == {"torch": f"{torch}+cpu"}


def test_every_python_that_is_promised_is_run():
    promised = set(re.findall(r"Python :: (3\.\d+)", PROJECT))
    assert promised == {tried()[0]["Python"], *(entry["python"] for entry in MATRIX)}
    assert promised <= {row["Python"] for row in tried()}


def test_the_oldest_versions_are_those_of_the_last_row_and_within_the_bounds_of_the_package():
    oldest = tried()[-1]
    (entry,) = (entry for entry in MATRIX if "oldest.txt" in entry.get("constraint", ""))
    assert entry["python"] == oldest["Python"]
    assert entry["torch"] == oldest["PyTorch"].split(",")[0]
    expected = {"torch": entry["torch"], "nvflare": oldest["NVFlare"]}
    expected |= {name.lower(): oldest[name] for name in ("MONAI", "NumPy", "nibabel")}
    named = re.findall(
        r"(SciPy|SimpleITK|typer|rich|Matplotlib|cryptography) ([\d.]+\d)", oldest["what was run"]
    )
    expected |= {name.lower(): version for name, version in named}
    pinned = {name.lower(): version for name, version in pins(".github/oldest.txt").items()}
    assert pinned == expected
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", PROJECT, re.M | re.S)
    bounds = {r.name.lower(): r for r in map(Requirement, re.findall(r'^    "(.+?)"', listed[1], re.M))}
    for name, version in pinned.items():
        assert bounds[name].specifier.contains(version), name


def test_the_files_of_tests_that_a_job_names_exist():
    named = re.findall(r"tests/\S+\.py", steps("versions"))
    assert named
    assert all((ROOT / path).is_file() for path in named)
