"""The process of a kit: its record, what a restart would change, and start and stop of this kit only."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rehearsed_hospitals import HOSPITALS

from medfedaug.nvflare_jobs.kit.doctor import check_process
from medfedaug.nvflare_jobs.kit.kit import open_kit
from medfedaug.nvflare_jobs.kit.kit_process import ProcessRecord

SITE = HOSPITALS[0]


@pytest.fixture
def kit(kit) -> Path:
    return kit.path


@pytest.fixture
def run_as():
    """Start a program whose command line is that of a kit's process; it ends with the test."""
    started = []

    def start(kit: Path) -> subprocess.Popen:
        module = "nvflare.private.fed.app.client.client_train"
        command = [sys.executable, "-c", "import time; time.sleep(60)", "-m", module, "-m", str(kit)]
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def later(path: Path) -> None:
    os.utime(path, (time.time() + 2, time.time() + 2))


def the_process(kit: Path):
    """The finding of `doctor`, without those on software and data."""
    return check_process(open_kit(kit))


def test_a_process_that_was_started_before_site_configure_is_not_ready(kit, run_as):
    assert the_process(kit).found == "does not run"
    run_as(kit)
    found = the_process(kit)
    assert found.ok is False
    assert "without the components of site configure" in found.found
    assert found.advice == f"medfedaug site restart {kit}"


def test_doctor_names_what_a_restart_would_change(kit, run_as):
    process = run_as(kit)
    record = ProcessRecord(process.pid, time.time() + 1, written=time.time())
    record.save(kit)
    assert the_process(kit).ok is None, "the server has not answered"
    record = replace(record, heard=time.time())
    record.save(kit)
    assert the_process(kit).ok is True
    later(kit / "startup/client.crt")
    assert the_process(kit).ok is None
    later(kit / "local/resources.json")
    found = the_process(kit)
    assert found.ok is False
    assert found.found.endswith("with an earlier local/resources.json, startup/client.crt")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "medfedaug.running_kit", "version": 1}'])
def test_a_damaged_record_is_no_record(kit, text):
    (kit / "running.json").write_text(text)
    assert ProcessRecord.load(kit) is None
    assert the_process(kit).ok is True


def health(kit, run, **changes):
    record = ProcessRecord(os.getpid(), time.time(), time.time())
    replace(record, **changes).save(kit)
    return run("site", "doctor", kit, "--health")[:2]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"written": 1.0}, 1),
        ({"stopping": True}, 1),
        ({"pid": 2**22 + 1}, 0),  # in another container
        ({"heard": time.time() - 600}, 1),
    ],
)
def test_the_health_of_a_process_follows_from_its_record(kit, run, changes, code):
    assert health(kit, run, **{"heard": time.time(), **changes})[0] == code


def test_a_site_that_the_server_has_never_answered_does_not_work(kit, run):
    code, out = health(kit, run, started=time.time() - 600)
    assert (code, "the server has not answered for" in out) == (1, True)


def test_the_script_of_another_kit_is_not_taken_for_a_kits_own(kits, tmp_path, run):
    """A kit was copied while it ran, or its number is another script's after a reboot."""
    copy = shutil.copytree(kits / SITE, tmp_path / "copy")
    script = kits / HOSPITALS[1] / "startup" / "sub_start.sh"
    with subprocess.Popen(["bash", "-c", "sleep 60; true", str(script)]) as other:
        (copy / "daemon_pid.fl").write_text(str(other.pid))
        code, out, err = run("site", "stop", copy, "--timeout", "1")
        other.kill()
    assert (code, err) == (0, "")
    assert "does not run" in out
    assert not (copy / "shutdown.fl").exists(), "the next start would end at once"


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        (0o644, "#!/bin/sh", "start.sh: Permission denied"),
        (0o755, "#!/bin/sh\necho no python3\nexit 3", "does not start: no python3"),
    ],
)
def test_a_start_script_that_cannot_run_is_said_in_one_line(kit, run, mode, text, words):
    script = kit / "startup/start.sh"
    script.write_text(text)
    script.chmod(mode)
    code, _, err = run("site", "start", kit, "--timeout", "1")
    assert (code, "Traceback" in err) == (2, False)
    assert words in " ".join(err.split())
