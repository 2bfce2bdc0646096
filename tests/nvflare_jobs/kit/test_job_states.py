"""States of jobs in NVFlare's store and at a site, and what watch and restart say of jobs."""

import json
import os
import time

import pytest
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage

from medfedaug.config.run import RunConfig
from medfedaug.hospital.privacy.job_log import Origin
from medfedaug.nvflare_jobs.kit import kit_process, kit_start
from medfedaug.nvflare_jobs.kit.job_states import job_states, running_jobs


def stored(server, job, status, *, name="brain", submitted=1.0, days=0.0):
    """A job in NVFlare's store, whose status changed so many days ago."""
    uri = str(server.folders()["jobs-storage"] / job)
    meta = {"job_id": job, "name": name, "status": status, "submit_time": submitted}
    FilesystemStorage().create_object(uri, b"", meta)
    then = time.time() - days * 86400
    os.utime(f"{uri}/meta", (then, then))


def events(kit, job, *entries, age=0.0):
    """The events that a job's process wrote in a kit, alive so many seconds ago."""
    path = kit.path / job / "medfedaug/events.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    path.with_name("alive").touch()
    os.utime(path.with_name("alive"), (time.time() - age, time.time() - age))


@pytest.mark.parametrize(
    ("status", "runs"),
    [("SUBMITTED", False), ("DISPATCHED", True), ("RUNNING", True), ("FINISHED:ABNORMAL", False)],
)
def test_the_job_store_says_what_runs_at_a_server(server, status, runs):
    stored(server, "j1", status)
    assert running_jobs(server) == ({"j1": "brain"} if runs else {})


def test_the_living_processes_are_the_running_jobs_of_a_site(kit):
    events(kit, "j1", {"event": "warning", "text": "none"})
    events(kit, "j2", {"event": "warning", "text": "none"}, age=600)
    assert running_jobs(kit) == {"j1": ""}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("SUBMITTED", "submitted"),
        ("RUNNING", "running"),
        ("FINISHED:COMPLETED", "finished"),
        ("FINISHED:ABORTED", "aborted"),
        ("FINISHED:EXECUTION_EXCEPTION", "abnormal"),
    ],
)
def test_states_are_those_of_the_job_store(server, status, state):
    stored(server, "j1", status)  # without events: its process was killed before it wrote one
    assert job_states(server) == {"j1": state}


def test_a_resumed_job_stands_for_the_one_that_it_continues_and_an_end_counts_for_a_day(server):
    stored(server, "j1", "FINISHED:ABNORMAL", submitted=1.0)
    stored(server, "j2", "FINISHED:COMPLETED", submitted=2.0)
    stored(server, "j3", "FINISHED:ABNORMAL", name="liver", days=1.1)
    assert job_states(server) == {"j2": "finished"}


def test_a_running_job_without_a_process_is_stalled_and_one_that_failed_is_abnormal(server):
    stored(server, "j1", "RUNNING")
    events(server, "j1", {"event": "round_started", "round": 1, "rounds": 3}, age=600)
    stored(server, "j2", "FINISHED:COMPLETED", name="liver")
    events(server, "j2", {"event": "failed", "message": "no site answered"})
    assert job_states(server) == {"j1": "stalled", "j2": "abnormal"}


def test_a_job_waits_for_approval_until_it_is_approved_or_gone(kit):
    entry = kit.job_book().note(RunConfig(), "j1", Origin(name="brain", asked=1.0))
    assert job_states(kit) == {}  # no process waits
    events(kit, "j1", {"event": "warning", "text": "none"})
    assert job_states(kit) == {"j1": "approval"}
    kit.job_book().judge(entry.hash, "approved")
    assert job_states(kit) == {"j1": "running"}


def test_watch_says_that_a_job_waits_for_approval_until_it_is_approved(kit, run):
    entry = kit.job_book().note(RunConfig(), "j1", Origin(name="brain", asked=1.0))
    events(kit, "j1", {"event": "warning", "text": "none"})
    assert run("site", "watch", kit.path, "--once")[1].startswith("j1: waits for approval")
    kit.job_book().judge(entry.hash, "approved")
    shown = run("site", "watch", kit.path, "--once")[1]
    assert shown.startswith("j1: round 0 of 0, running")
    assert "by round" not in shown, "a table without rows"


def test_watch_says_that_a_newer_job_has_ended_of_which_the_server_keeps_no_folder(server, run):
    stored(server, "j0", "FINISHED:COMPLETED", submitted=0.5)
    assert run("site", "watch", server.path, "--once")[1].startswith(
        "brain (j0): finished:completed; fetch it with"
    )
    stored(server, "j1", "RUNNING", submitted=1.0)
    events(server, "j1", {"event": "round_started", "round": 1, "rounds": 3}, age=600)
    assert run("site", "watch", server.path, "--once")[1].startswith("j1: ")
    stored(server, "j2", "FINISHED:COMPLETED", submitted=2.0)
    assert run("site", "watch", server.path, "--once")[1].startswith(
        "brain (j2): finished:completed; fetch it with"
    )


def test_restart_names_running_jobs_and_asks(server, run, monkeypatch):
    stored(server, "j1", "RUNNING")
    monkeypatch.setattr(kit_process, "find_process", lambda kit: object())
    monkeypatch.setattr(kit_start, "restart", lambda kit, timeout: "runs as process 7")
    code, out, err = run("site", "restart", server.path)
    assert code == 2
    assert "job j1 (brain) runs, and ends here; the lead submits it again with --resume" in " ".join(
        out.split()
    )
    assert "give --yes" in err
    code, out, _ = run("site", "restart", server.path, "--yes")
    assert (code, out.strip().endswith("runs as process 7")) == (0, True)
