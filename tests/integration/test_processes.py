"""What ends with `medfedaug simulate`: its processes, however it dies; its locks, no sooner than these."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from filelock import FileLock, Timeout
from running import TINY_OPTIONS

from medfedaug.errors import ConfigError
from medfedaug.federation.job_folder import server_checkpoint
from medfedaug.runs.folder import only_process, sites_lock

MARK = "MEDFEDAUG_TEST_MARK"


def marked(mark: str) -> list[psutil.Process]:
    """All processes with this mark in their environment."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


def wait_for(condition, what: str, seconds: float = 300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture
def simulation(phantom_dir, tmp_path, tiny_config):
    """A command that is at work, in a session of its own, after its first round: itself and its mark."""
    for site in ("site_A", "site_B"):
        shutil.copytree(phantom_dir / site, tmp_path / "data" / site)
    mark, out = uuid.uuid4().hex, tmp_path / "out"
    arguments = [
        *("simulate", "--data", str(tmp_path / "data"), "--out", str(out)),
        *("--methods", "fedavg", "--rounds", "10000", "--batch-size", "4", "--threads", "1", "--no-report"),
        *TINY_OPTIONS,
        *("--device", "cpu"),
    ]
    command = [sys.executable, "-c", "from medfedaug.cli import main; main()", *arguments]
    process = subprocess.Popen(
        command, env={**os.environ, MARK: mark}, start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(
            lambda: server_checkpoint(out / "state").exists() or process.poll() is not None, "no first round"
        )
        yield process, mark, out
    finally:
        process.kill()
        process.wait()
        for one in marked(mark):
            one.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_simulation_that_is_ended_leaves_no_process_and_no_free_lock_beside_one(simulation, number):
    process, mark, out = simulation
    at_work = marked(mark)
    assert len(at_work) >= 4  # itself, what watches over it, NVFlare's simulator, two sites
    (watching,) = psutil.Process(process.pid).children()  # which lets go of the lock, and ends
    with pytest.raises(Timeout), FileLock(sites_lock(out)).acquire(timeout=0):
        pass
    process.send_signal(number)
    process.wait(60)
    # As long as one is alive, nobody else gets the lock.
    free_beside = []

    def ended() -> bool:
        try:
            with FileLock(sites_lock(out)).acquire(timeout=0):
                free_beside.extend(one for one in marked(mark) if one != watching)
        except Timeout:
            pass
        return not marked(mark)

    wait_for(ended, "processes are left", 60)
    assert not free_beside
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert [path.name for path in out.parent.iterdir() if path.name.startswith(".out")] == []
        assert [path for path in out.glob(".*") if path != sites_lock(out)] == []  # which was made above
    with only_process(out):
        assert not sites_lock(out).exists()


def test_a_run_waits_for_the_sites_of_one_that_was_killed(tmp_path, monkeypatch):
    from medfedaug.runs import folder

    monkeypatch.setattr(folder, "_WAIT_FOR_SITES", 0.1)
    out = tmp_path / "out"
    out.mkdir()
    with (
        FileLock(sites_lock(out)),
        pytest.raises(ConfigError, match="sites of an earlier process are still at work on this run"),
        only_process(out),
    ):
        pass
    with only_process(out):
        pass
    assert not list(out.glob(".*"))
