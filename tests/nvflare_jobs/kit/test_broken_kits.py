"""No kit that is broken, unprotected or moved is called ready without a word."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import certificates
import numpy as np
import pytest
from benchmark_files import write_volume
from rehearsed_hospitals import HOSPITALS, SERVER

from medfedaug.errors import RunFailed
from medfedaug.nvflare_jobs.kit.doctor import examine
from medfedaug.nvflare_jobs.kit.kit import open_kit
from medfedaug.nvflare_jobs.kit.kit_checks import check_process
from medfedaug.nvflare_jobs.kit.kit_process import ProcessRecord, settings_at_start
from medfedaug.nvflare_jobs.kit.kit_start import start

SITE = HOSPITALS[0]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("DATA", "DEVICE", "STATE", "MEMORY", "CACHE"):
        monkeypatch.delenv(f"MEDFEDAUG_{name}", raising=False)


@pytest.fixture
def kit(ready_kit) -> Path:
    return ready_kit


@pytest.fixture
def root(provisioned):
    return certificates.root_key(provisioned)


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


def edit(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def component(kit: Path, **values) -> None:
    path = kit / "local/resources.json"
    edit(path, components=[*json.loads(path.read_text())["components"], values])


def without(kit: Path, identifier: str) -> None:
    path = kit / "local/resources.json"
    left = [one for one in json.loads(path.read_text())["components"] if one["id"] != identifier]
    edit(path, components=left)


def wrong_label(data: Path, value: int) -> None:
    label = np.zeros((16, 16, 4), np.uint8)
    label[4:9, 4:9, 1:3] = value
    write_volume(data / "labels/3.nii.gz", label)


ALLOW_NOBODY = '{"format_version": "1.0", "permissions": {"lead": {"submit_job": "q:all"}}}'
NO_RIGHTS = '{"format_version": "1.0"}'
NO_SCOPE = '{"scopes": [{"name": "all"}], "default_scope": "none"}'

# The check, its words, the file below local, and its new text, mode or entries.
CHANGED = {
    "privacy is no JSON": ("privacy.json", "(JSONDecodeError)", "privacy.json", '{"scopes": ['),
    "no default scope": ("privacy.json", "'none' does not exist", "privacy.json", NO_SCOPE),
    "no permissions": ("authorization.json", "missing permissions", "authorization.json", NO_RIGHTS),
    "no such right": ("authorization.json", "q:all", "authorization.json", ALLOW_NOBODY),
    "a log not set up": ("log_config.json", "has no entry 'handlers'", "log_config.json", '{"version": 1}'),
    "resources are no JSON": ("kit", "not readable as JSON", "resources.json", "{]"),
    "logs are sent": ("logs", "sent to the server", "resources.json", {"allow_log_streaming": True}),
    "job files of any kind": ("job files", "HOCON or YAML", "resources.json", {"app_validator": None}),
    "local for everybody": ("modes", "local can be written by everybody (mode 777)", ".", 0o777),
    "a script for all": ("modes", "sub_start.sh can be written by ev", "../startup/sub_start.sh", 0o777),
}
# The check, its words, and a function of kit, data and root.
BROKEN = {
    "labels outside of the classes": ("labels", "label values 7", lambda k, d, r: wrong_label(d, 7)),
    "a label map that is no image": (
        *("data", "labels/2.nii.gz"),
        lambda k, d, r: (d / "labels/2.nii.gz").write_text("no image"),
    ),
    "no policy": (
        *("authorization.json", "policy definition is empty"),
        lambda k, d, r: [path.unlink() for path in k.glob("local/authorization.json*")],
    ),
    "no resources": (
        *("components", "not in resources.json"),
        lambda k, d, r: (k / "local/resources.json").unlink(),
    ),
    "a component that is not installed": (
        *("resources.json", "no module 'nowhere.at' is installed"),
        lambda k, d, r: component(k, id="extra", path="nowhere.at.All", args={}),
    ),
    "a pipe in place of the resources": (
        *("kit", "is no file"),
        lambda k, d, r: pipe(k / "local/resources.json"),
    ),
    "no launcher": ("launcher", "0 in resources.json", lambda k, d, r: without(k, "process_launcher")),
    "no watch over its process": ("components", "KitStatus", lambda k, d, r: without(k, "medfedaug_status")),
    "a file of another user": (
        *("modes", "belongs to another user"),
        lambda k, d, r: os.chown(k / "local/resources.json", 12345, -1),
    ),
    "a state folder that is gone": (
        *("storage", "begin anew"),
        lambda k, d, r: edit(k / "local/medfedaug.json", state=str(k.parent / "unmounted" / "state")),
    ),
}


def test_the_kit_before_it_is_broken_is_ready(kit):
    assert {check.name: check.ok for check in examine(kit) if check.ok is not True} == {}


@pytest.mark.parametrize("spoil", [os.mkfifo, Path.mkdir])
def test_an_odd_entry_in_startup_is_not_read(kit, spoil):
    before = settings_at_start(kit)
    spoil(kit / "startup" / "odd.json")
    assert settings_at_start(kit) == before


def test_a_number_that_is_a_folder_is_named(kit):
    (kit / "daemon_pid.fl").mkdir()
    with pytest.raises(RunFailed, match=r"daemon_pid.fl: cannot be removed .*; remove it"):
        start(kit)


@pytest.mark.parametrize("name", [*CHANGED, *BROKEN])
def test_a_broken_kit_is_not_called_ready_without_a_word(kit, root, request, name):
    if name in BROKEN:
        check, words, spoil = BROKEN[name]
        if name == "a file of another user" and os.getuid():
            pytest.skip("only root can give files away")
        spoil(kit, request.getfixturevalue("own_data") if check in ("data", "labels") else None, root)
    else:
        check, words, file, change = CHANGED[name]
        path = kit / "local" / file
        if isinstance(change, dict):
            edit(path, **change)
        else:
            path.write_text(change) if isinstance(change, str) else path.chmod(change)
    problems = {one.name: one for one in examine(kit) if one.ok is not True}
    assert check in problems, problems
    assert words in problems[check].found
    assert problems[check].advice


def test_a_server_that_was_moved_is_found_and_site_configure_mends_it(kits, tmp_path):
    kit = open_kit(kits / SERVER)
    kit.write(kit.plan(forbid=True))
    moved = open_kit(shutil.move(kit.path, tmp_path / "elsewhere"))
    found = [one for one in examine(moved.path) if one.ok is False]
    assert [one.name for one in found] == ["storage", "storage"]
    assert all("outside of this kit, which was moved" in one.found for one in found)
    moved.write(moved.plan())
    assert [one for one in examine(moved.path) if one.ok is False] == []
    assert {str(folder.parent) for folder in moved.folders().values()} == {str(moved.path.resolve())}


def the_process(kit: Path):
    """The finding of `doctor`, without those on software and data."""
    return check_process(open_kit(kit))


def test_a_process_that_was_started_before_site_configure_is_not_ready(kit, run_as, run):
    assert the_process(kit).found == "does not run"
    run_as(kit)
    found = the_process(kit)
    assert found.ok is False
    assert "without the components of site configure" in found.found
    assert found.advice == f"medfedaug site restart {kit}"
    code, out, _ = run("site", "doctor", kit, "--offline")
    assert (code, out.splitlines()[-1]) == (1, "not ready: process")


def test_doctor_names_what_a_restart_would_change(kit, run_as):
    process = run_as(kit)
    record = ProcessRecord(process.pid, time.time(), settings=settings_at_start(kit), written=time.time())
    record.save(kit)
    assert the_process(kit).ok is None, "the server has not answered"
    record = replace(record, heard=time.time(), clock=0.2, server_version=record.settings["medfedaug"])
    record.save(kit)
    assert the_process(kit).ok is True
    edit(kit / "local/resources.json", allow_log_streaming=True)
    found = the_process(kit)
    assert found.ok is False
    assert "local/resources.json: allow_log_streaming: false runs, true after a restart" in found.found
    edit(kit / "local/resources.json", allow_log_streaming=False)
    edit(kit / "local/resources.json", class_allow_list=["hospital.tools.Tool"])  # read with each job
    assert the_process(kit).ok is True
    (kit / "startup/client.crt").write_bytes(b"another")
    assert the_process(kit).ok is None
    replace(record, server_version="0.2.0").save(kit)
    assert "startup/client.crt" in the_process(kit).found


def test_a_process_of_another_version_than_the_server_is_not_ready(kit, run_as):
    process = run_as(kit)
    now, settings = time.time(), settings_at_start(kit)
    ProcessRecord(process.pid, now, [], settings, now, False, now, 0.0, "0.0.1").save(kit)
    found = the_process(kit)
    assert found.ok is False
    assert "0.0.1 at the server" in found.found
    assert found.advice == "install the wheel of medfedaug 0.0.1"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "medfedaug.running_kit", "version": 1}'])
def test_a_damaged_record_is_no_record(kit, text):
    (kit / "running.json").write_text(text)
    assert ProcessRecord.load(kit) is None
    assert the_process(kit).ok is True


@pytest.mark.parametrize(
    "values",
    [
        {"pid": "abc"},
        {"pid": 2**70},
        {"heard": "today"},
        {"clock": [1]},
        {"started": 10**400},
        {"written": 1e300},
        {"settings": [1]},
        {"sites": {"a": None}},
        {"server_version": "0.3 --index-url http://example.org"},
    ],
    ids=str,
)
def test_a_record_of_other_types_is_no_record(kit, run_as, run, values):
    process, now = run_as(kit), time.time()
    ProcessRecord(process.pid, now, settings=settings_at_start(kit), written=now).save(kit)
    edit(kit / "running.json", **values)
    assert ProcessRecord.load(kit) is None
    assert the_process(kit).ok is False
    assert run("site", "doctor", kit, "--health")[0] == 1


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
        (0o644, "#!/bin/sh", "cannot be run (Permission denied)"),
        (0o755, "no script", "cannot be run (Exec format error)"),
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
