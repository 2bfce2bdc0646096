"""Commands that compute nothing import neither PyTorch nor MONAI, with all that they really do."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hospitals import Deployment, Hospital
from running import TINY_NETWORK
from typer.main import get_command

from medfedaug.cli import app
from medfedaug.config.run import RunConfig

HEAVY = ("torch", "monai", "matplotlib", "scipy", "SimpleITK", "nibabel")
# Run the command as its script does, and say at the end what of the libraries it brought.
SCRIPT = f"""
import sys
from medfedaug.cli import main
try:
    main()
finally:
    print("imported:", *(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)
"""


def light(*arguments, code=0):
    """The output of a command in a process of its own, in which none of the libraries was imported."""
    call = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    said = done.stderr.splitlines()
    assert "imported:" in [line.strip() for line in said], f"{arguments}: {done.stderr}"
    return " ".join(done.stdout.split()), " ".join(said)


@pytest.fixture(scope="module")
def kit(phantom_dir, tmp_path_factory):
    """The kit of a site that has taken part in a job, which has ended."""
    folder = tmp_path_factory.mktemp("kits")
    settings = {"privacy": {"min_images": 1}, "jobs": {"min_cases": 1}}
    hospitals = [Hospital(folder / n, phantom_dir / n, **settings) for n in ("site_A", "site_B")]
    methods = ({"name": "fedfa", "args": {}},)
    Deployment(hospitals).run(RunConfig(methods=methods, network_args=TINY_NETWORK, rounds=1, batch_size=4))
    for hospital in hospitals:
        hospital.executor.handle_event("_end_run", hospital.context)
    return folder / "site_A"


@pytest.mark.parametrize("name", [None, "fedfa", "FedFA", "fedfa+"])
def test_methods(name):
    out, _ = light("methods", *filter(None, [name]))
    assert "fedfa" in out


@pytest.mark.parametrize("name", [None, "basicunet"])
def test_networks(name):
    out, _ = light("networks", *filter(None, [name]))
    assert "MONAI's BasicUNet" in out


@pytest.mark.parametrize("name", [None, "lgg_multisite"])
def test_data_sets(name):
    out, _ = light("datasets", *filter(None, [name]))
    assert "LGG" in out


@pytest.mark.parametrize("command", ["methods", "networks", "datasets"])
def test_an_unknown_name(command):
    _, err = light(command, "nothing_of_that_name", code=2)
    assert "is not known" in err


def test_the_ledger_of_a_site(kit):
    out, _ = light("ledger", kit)
    assert "job-1: fedfa " in out
    assert "SHA-256" in light("ledger", kit, "--every")[0]


def test_the_jobs_of_a_site(kit):
    out, _ = light("jobs", kit)
    assert "1 ended" in out
    assert "fedfa" in out


def test_the_state_of_a_job(kit):
    out, _ = light("watch", kit, "--once")
    assert "training loss" in out


def test_the_disk_space_of_a_kit(kit):
    out, _ = light("clean", "--kit", kit, "--older-than", 1)
    assert "stays: ledger, keys and book of jobs" in out


@pytest.mark.parametrize("file", ["experiment", "site-settings"])
def test_the_schema_of_a_file(file):
    assert "json-schema.org" in light("schema", file)[0]


def test_the_help_of_each_command():
    for name in ["", *get_command(app).commands]:
        out, _ = light(*filter(None, [name, "--help"]))
        assert "Usage:" in out
