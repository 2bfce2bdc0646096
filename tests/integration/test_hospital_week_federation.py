"""A week of a federation with keys of its own: enrolment, late site, reboot, withdrawal, clean disks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from reboot_parts import Deployment
from rehearsal_processes import left_running
from rehearsed_hospitals import HOSPITALS, SERVER
from running import command

from medfedaug.nvflare_jobs.kit.kit_process import ProcessRecord, find_process

FIRST, SECOND, LATE = HOSPITALS[:3]
LIMITS = ("--rounds", "2", "--local-epochs", "1")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Three hospitals with data, none of which is enrolled."""
    with Deployment(tmp_path / "work", hospitals=(FIRST, SECOND, LATE)) as deployment:
        for name in ("HOME", "PATH", "OMP_NUM_THREADS"):
            monkeypatch.setenv(name, deployment.environment[name])
        deployment.make_data()
        yield deployment
    assert left_running(tmp_path) == []


def plain(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def output(system, *arguments, code: int = 0) -> str:
    """Output of a command as plain text."""
    ended, out, err = command(*arguments)
    assert ended == code, out + err
    return plain(out + err)


def doctor(system, name: str) -> tuple[bool, dict[str, dict]]:
    """Whether a kit is ready, and its checks by name."""
    file = system.work / "doctor.json"
    command("site", "doctor", system.kit(name), "--json", file)
    content = json.loads(file.read_text())
    return content["ready"], {one["name"]: one for one in content["checks"]}


def numbers(system, name: str) -> dict[str, float]:
    """The numbers of a kit as Prometheus reads them, by name and labels."""
    file = system.work / "kit.prom"
    output(system, "site", "watch", system.kit(name), "--once", "--prometheus", file)
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def join(system, name: str) -> None:
    """One command a side, the site's settings, and a start that waits for the server."""
    system.enrol(name)
    configured = output(
        *(system, "site", "configure", system.kit(name), "--data", system.data[name]),
        *("--device", "cpu", "--forbid-code", "--only-medfedaug", "--min-images", "4"),
    )
    assert "medfedaug.nvflare_jobs.kit.kit_status.KitStatus" in configured
    assert "allow_log_streaming: false" in configured
    assert "runs as process" in output(system, "site", "start", system.kit(name), "--timeout", "300")
    ready, checks = doctor(system, name)
    assert ready, checks
    assert checks["process"]["found"].endswith("the server answers")
    assert "which the running kit asked" in checks["clock"]["found"]
    assert output(system, "site", "doctor", system.kit(name), "--health").endswith("works")


def run_job(system, name: str, sites: int) -> str:
    return system.submit(system.export(name, "fedavg", *LIMITS, "--min-sites", str(sites)))


def trained(system, job: str) -> set[str]:
    results = json.loads((system.collect(job) / "results.json").read_text())
    return {site for entry in results["rounds"] for site, own in entry["sites"].items() if "samples" in own}


def make_old(folder: Path, days: float) -> None:
    """Let everything below a folder have been used for the last time so many days ago."""
    then = time.time() - days * 86400
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then), follow_symlinks=False)


@pytest.mark.slow
def test_a_week_of_a_federation(system):
    # Monday: the root, the server, two hospitals, and the lead.
    system.hospitals = (FIRST, SECOND)
    system.kits = system.work / "kits"
    here = ("--server", "localhost", "--port", str(system.port))
    assert "keep it offline" in output(
        system, "enrol", "project", *here, "--own-keys", system.work / "project"
    )
    system.enrol("localhost", "server", kit=SERVER)
    assert "jobs-storage" in output(system, "site", "configure", system.kit(SERVER), "--only-medfedaug")
    assert "runs as process" in output(system, "site", "start", system.kit(SERVER))
    for person, kind in (("admin@example.org", "admin"), ("lead@example.org", "lead")):
        system.enrol(person, kind)
    for hospital in system.hospitals:
        join(system, hospital)
    system.wait_for_clients()
    job = run_job(system, "monday", 2)
    system.wait(job)
    assert trained(system, job) == {FIRST, SECOND}

    # Tuesday: a hospital comes later, and nobody else does anything.
    before = {name: find_process(system.kit(name)).pid for name in (SERVER, FIRST)}
    system.hospitals = (FIRST, SECOND, LATE)
    join(system, LATE)
    system.wait_for_clients()
    assert {name: find_process(system.kit(name)).pid for name in (SERVER, FIRST)} == before
    job = run_job(system, "tuesday", 3)
    # Its machine goes down in the middle, and the hospital is told how to come back.
    system.await_event(job, event="round_started", round=1)
    system.switch_off(SECOND)
    assert output(system, "site", "doctor", system.kit(SECOND), "--health", code=1)
    system.await_event(job, event="waiting", timeout=300)
    assert f"stalled: waiting for {SECOND}" in output(system, "site", "watch", system.kit(SERVER), "--once")
    states = [name for name, value in numbers(system, SERVER).items() if "job_state" in name and value]
    assert any(f'job="{job}"' in name and 'state="stalled"' in name for name in states)
    refused = output(system, "site", "restart", system.kit(SERVER), code=2)
    assert f"job {job} (tuesday) runs, and ends here" in refused
    assert "give --yes to restart while jobs run" in refused
    assert "the server has not answered" not in output(
        *(system, "site", "restart", system.kit(SECOND), "--timeout", "300")
    )
    system.wait(job)
    assert trained(system, job) == {FIRST, SECOND, LATE}

    # Wednesday: new rules at a site. They hold after its restart, and doctor says so.
    settings = system.kit(FIRST) / "local/resources.json"
    settings.write_text(settings.read_text().replace('"expiration_period": 300', '"expiration_period": 200'))
    ready, checks = doctor(system, FIRST)
    assert not ready
    assert "components.resource_manager" in checks["process"]["found"]
    assert "after a restart" in checks["process"]["found"]
    assert "runs as process" in output(system, "site", "restart", system.kit(FIRST))
    assert doctor(system, FIRST)[0]
    assert [v for name, v in numbers(system, FIRST).items() if "restart_needed" in name] == [0]

    # Thursday: a hospital withdraws, and the others go on.
    assert output(system, "site", "stop", system.kit(LATE)).endswith("has stopped")
    assert find_process(system.kit(LATE)) is None
    assert [v for name, v in numbers(system, LATE).items() if "kit_up" in name] == [0]
    assert ProcessRecord.load(system.kit(LATE)).stopping
    system.hospitals = (FIRST, SECOND)
    job = run_job(system, "thursday", 2)
    system.wait(job, timeout=300)
    assert trained(system, job) == {FIRST, SECOND}
    assert any(f'site="{LATE}"' in name for name in numbers(system, SERVER)), "when it was last heard from"

    # Friday: old jobs go, and what a site answers for stays.
    kit = system.kit(FIRST)
    jobs = [path.parent.parent for path in kit.glob("*/medfedaug/events.jsonl")]
    assert len(jobs) == 3
    for folder in jobs:
        make_old(folder, days=100)
    make_old(kit / "medfedaug", days=100)
    would = output(system, "site", "clean", kit, "--older-than", "90")
    assert "would go" in would
    assert "ledger" in would
    left = output(system, "site", "ledger", kit)
    assert "removed" in output(system, "site", "clean", kit, "--older-than", "90", "--yes")
    assert not any(folder.exists() for folder in jobs)
    assert output(system, "site", "ledger", kit) == left
    assert doctor(system, FIRST)[0]
    for name in (FIRST, SECOND, SERVER):
        assert output(system, "site", "stop", system.kit(name)).endswith("has stopped")
