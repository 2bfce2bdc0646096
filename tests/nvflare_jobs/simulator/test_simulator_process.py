"""When server and sites are forks of one process, and when they start afresh."""

import sys
import time

import psutil
import pytest

from medfedaug.nvflare_jobs.simulator import simulator_process
from medfedaug.nvflare_jobs.simulator.simulator_process import (
    FAST_START_VARIABLE,
    VERSIONS,
    SimulatorProcess,
    Start,
    discard,
    no_fast_start,
    prepare,
)


@pytest.fixture(autouse=True)
def _none_left():
    yield
    discard()


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [child for child in found if any("forked_simulator" in text for text in command_of(child))]


def command_of(process: psutil.Process) -> list[str]:
    """Its command line, which a process that is just starting does not have yet on a busy machine."""
    for _ in range(200):
        if process.status() == psutil.STATUS_ZOMBIE or (command := process.cmdline()):
            break
        time.sleep(0.02)
    else:
        return []
    return [] if process.status() == psutil.STATUS_ZOMBIE else command


def start(tmp_path, **environment) -> Start:
    return Start(
        job="job",
        workspace="work space",
        sites=["A", "B"],
        environment=environment,
        lock=str(tmp_path / "lock"),
        log=str(tmp_path / "log"),
    )


def test_forks_are_for_linux_for_known_versions_and_for_users_that_do_not_refuse_them(monkeypatch):
    monkeypatch.delenv(FAST_START_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(simulator_process, "version", lambda name: VERSIONS[0])
    assert no_fast_start() is None
    monkeypatch.setattr(simulator_process, "version", lambda name: "2.9.7")
    assert no_fast_start() == f"a fast start is for NVFlare {', '.join(VERSIONS)}, and 2.9.7 is installed"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert no_fast_start() == "processes are forked on Linux alone"
    monkeypatch.setenv(FAST_START_VARIABLE, "0")
    assert no_fast_start() == f"{FAST_START_VARIABLE}=0"


def test_a_prepared_process_ends_with_the_command_that_does_not_use_it(monkeypatch):
    monkeypatch.delenv(FAST_START_VARIABLE, raising=False)
    prepare(1)
    (first,) = children()
    assert first.environ()["OMP_NUM_THREADS"] == "1"
    prepare(2)  # one at a time
    (second,) = children()
    assert second != first
    discard()
    assert not children()
    monkeypatch.setenv(FAST_START_VARIABLE, "0")
    prepare(1)
    assert not children()


def test_a_simulation_takes_the_prepared_process_only_where_the_environment_is_still_the_same(
    tmp_path, monkeypatch
):
    monkeypatch.delenv(FAST_START_VARIABLE, raising=False)
    sent, given = [], start(tmp_path, MEDFEDAUG_DATA="y")
    monkeypatch.setattr(SimulatorProcess, "_send", lambda self, start: sent.append((self, start)))
    prepare(1)
    (prepared,) = children()
    monkeypatch.setenv("SET_BY_AN_IMPORT", "x")
    process = SimulatorProcess.start(given, 1)
    assert children() == [prepared]
    assert sent[-1][1].environment == {"SET_BY_AN_IMPORT": "x", "MEDFEDAUG_DATA": "y"}
    assert given.environment == {"MEDFEDAUG_DATA": "y"}
    process._discard()
    prepare(1)
    (prepared,) = children()
    process = SimulatorProcess.start(given, 2)  # threads are read when PyTorch is imported
    (other,) = children()
    assert other != prepared
    assert other.environ()["OMP_NUM_THREADS"] == "2"
    process._discard()


@pytest.mark.slow
def test_a_process_that_cannot_import_its_packages_says_why_in_the_log(tmp_path, monkeypatch):
    """A module of the user's own in the working folder hides one that NVFlare needs."""
    monkeypatch.delenv(FAST_START_VARIABLE, raising=False)
    (tmp_path / "monai.py").write_text("raise ImportError('not that one')\n")
    monkeypatch.chdir(tmp_path)
    process = SimulatorProcess.start(start(tmp_path), 1)
    process._process.wait(60)
    process.end()
    assert process.returncode == 1
    assert "not that one" in (tmp_path / "log").read_text()
