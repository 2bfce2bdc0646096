"""When server and sites are forks of one process, and when they start afresh."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from medfedaug.nvflare_jobs.simulator import simulator_process
from medfedaug.nvflare_jobs.simulator.simulator_process import (
    FAST_START_VARIABLE,
    VERSIONS,
    SimulatorProcess,
    Start,
    no_fast_start,
)


def test_forks_are_for_linux_for_known_versions_and_for_users_that_do_not_refuse_them(monkeypatch):
    monkeypatch.delenv(FAST_START_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(simulator_process, "version", lambda name: VERSIONS[0])
    assert no_fast_start() is None
    monkeypatch.setattr(simulator_process, "version", lambda name: "2.9.7")
    assert no_fast_start() == f"a fast start is for NVFlare {', '.join(VERSIONS)}, and 2.9.7 is installed"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert no_fast_start() == "processes are forked only on Linux"
    monkeypatch.setenv(FAST_START_VARIABLE, "0")
    assert no_fast_start() == f"{FAST_START_VARIABLE}=0"


def test_a_simulation_takes_the_fork_that_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(simulator_process, "no_fast_start", lambda: None)
    fork = SimpleNamespace(stdin=io.BytesIO(), poll=lambda: 3)
    monkeypatch.setattr(simulator_process, "waiting", [fork])
    start = Start(job="job", workspace="work space", sites=["A", "B"], lock="lock")
    process = SimulatorProcess(start, {"SITE": "é"}, tmp_path / "log")
    order = json.loads(fork.stdin.getvalue())
    assert Start(**order["start"]) == start
    assert order["environment"]["SITE"] == "é"
    assert order["log"] == str(tmp_path / "log")
    assert process.returncode == 3
    assert not simulator_process.waiting


@pytest.mark.slow
def test_a_process_that_cannot_import_its_packages_says_why_in_the_log(tmp_path, monkeypatch):
    """A module of the user's own in the working folder hides one that NVFlare needs."""
    monkeypatch.delenv(FAST_START_VARIABLE, raising=False)
    (tmp_path / "monai.py").write_text("raise ImportError('not that one')\n")
    monkeypatch.chdir(tmp_path)
    start = Start(job="job", workspace="work space", sites=["A", "B"], lock=str(tmp_path / "lock"))
    process = SimulatorProcess(start, {}, tmp_path / "log")
    process._process.wait(60)
    process.end()
    assert process.returncode == 1
    assert "not that one" in (tmp_path / "log").read_text()
