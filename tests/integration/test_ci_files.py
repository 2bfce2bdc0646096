"""The workflow, the hooks and the forms of the repository: versions, commands and files that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main as check_files
from click.testing import CliRunner
from packaging.requirements import Requirement
from tried_versions import pins, tried

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CI = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]


def steps(job: str) -> str:
    return "\n".join(step.get("run", "") for step in CI[job]["steps"])


def python_of(job: str) -> str:
    (version,) = (
        step["with"]["python-version"] for step in CI[job]["steps"] if "setup-python" in step.get("uses", "")
    )
    return version


def test_the_newest_job_runs_ci_run_with_the_first_row_of_the_table():
    newest = tried()[0]
    assert python_of("newest") == newest["Python"]
    assert "bash .ci/run" in steps("newest")
    torch = newest["PyTorch"].split(",")[0]
    assert f"torch=={torch}" in (ROOT / "Makefile").read_text()
    assert pins("deploy/cpu.txt") == {"torch": f"{torch}+cpu"}


def test_a_pull_request_has_a_figure_of_coverage():
    assert "if" not in CI["coverage"]
    assert "make coverage" in steps("coverage")
    assert re.search(r"coverage report --format=total.*>> \"\$GITHUB_STEP_SUMMARY\"", steps("coverage"), re.S)


def test_the_oldest_job_has_the_last_row_of_the_table_and_runs_its_tests():
    oldest = tried()[-1]
    assert python_of("oldest") == oldest["Python"]
    torch = oldest["PyTorch"].split(",")[0]
    assert f"torch=={torch}" in steps("oldest")
    expected = {"torch": torch, "nvflare": oldest["NVFlare"]}
    expected |= {name.lower(): oldest[name] for name in ("MONAI", "NumPy", "nibabel")}
    named = re.findall(
        r"(SciPy|SimpleITK|typer|rich|Matplotlib|cryptography) ([\d.]+\d)", oldest["what was run"]
    )
    expected |= {name.lower(): version for name, version in named}
    assert {name.lower(): version for name, version in pins(".github/oldest.txt").items()} == expected
    for path in re.findall(r"tests/\S+\.py", steps("oldest")):
        assert (ROOT / path).is_file()
        assert path in tried()[1]["what was run"], f"{path} was not tried on the oldest versions"


def test_the_oldest_versions_satisfy_the_bounds_of_the_package():
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    bounds = {r.name.lower(): r for r in map(Requirement, re.findall(r'^    "(.+?)"', listed[1], re.M))}
    oldest = {name.lower(): version for name, version in pins(".github/oldest.txt").items()}
    assert oldest.keys() <= bounds.keys()
    for name, version in oldest.items():
        assert bounds[name].specifier.contains(version), name


def test_commands_of_make_that_files_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    files = [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / ".ci/run"]
    files += [
        ROOT / "CONTRIBUTING.md",
        ROOT / "docs/releasing.md",
        ROOT / "docs/offline.md",
        ROOT / "README.md",
    ]
    named = set()
    for file in files:
        named |= set(re.findall(r"(?:^|`|run: |entry: )make ([a-z-]+)", file.read_text(), re.M))
    assert {"install", "lint", "docs", "dist", "types"} <= named
    assert named <= targets


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("dependabot", ".github/dependabot.yml"),
        ("citation-file-format", "CITATION.cff"),
        ("compose-spec", "deploy/compose.*.yml"),
    ],
)
def test_files_for_other_programs_have_their_schema(schema, pattern):
    files = sorted(ROOT.glob(pattern))
    assert files
    done = CliRunner().invoke(check_files, ["--builtin-schema", f"vendor.{schema}", *map(str, files)])
    assert done.exit_code == 0, done.output


def test_hooks_are_local_and_download_nothing():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks} <= {"system", "pygrep"}


@pytest.mark.parametrize(
    ("subject", "good"),
    [
        ("fix(data): refuse a sheared grid", True),
        ("cli: help texts begin with a verb", True),
        ("Fixed things", False),
        ("fix(data):refuse", False),
    ],
)
def test_the_hook_of_subjects_knows_topic_and_verb(subject, good):
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (hook,) = (hook for repo in config["repos"] for hook in repo["hooks"] if hook["id"] == "subject")
    assert bool(re.search(hook["entry"], subject)) is good


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_the_hash_of_their_content(path):
    """A tag of somebody else's repository may be moved."""
    used = re.findall(r"uses: *(.+)", path.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_that_may_write_runs_nothing_that_was_installed(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        if "write" in job.get("permissions", {}).values():
            commands = " ".join(step.get("run", "") for step in job["steps"])
            assert not re.search(r"\bmake\b|\bpip\b|\.venv|\.ci/run", commands)
