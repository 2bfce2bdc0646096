"""States of jobs in NVFlare's store and in a site's book, and what restart says of jobs that run."""

import json
import os
import time

import pytest
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage

from medfedaug.config.run import RunConfig
from medfedaug.hospital.privacy.job_log import Origin
from medfedaug.nvflare_jobs.kit import kit_process, kit_start
from medfedaug.nvflare_jobs.kit.job_states import job_standings


def stored(server, job, status, *, name="brain", submitted=1.0, days=0.0):
    """A job in NVFlare's store, whose end was so many days ago."""
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


def states(kit):
    return {one.job: one.state for one in job_standings(kit)}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("SUBMITTED", "submitted"),
        ("RUNNING", "running"),
        ("FINISHED:COMPLETED", "finished"),
        ("FINISHED:ABORTED", "aborted"),
        ("FINISHED:ABNORMAL", "abnormal"),
        ("FINISHED:EXECUTION_EXCEPTION", "abnormal"),
        ("FINISHED:CAN_NOT_SCHEDULE", "abnormal"),
    ],
)
def test_states_are_those_of_the_job_store(server, status, state):
    stored(server, "j1", status)  # without events: its process was killed before it wrote one
    assert states(server) == {"j1": state}


def test_a_resumed_job_stands_for_the_one_that_it_continues(server):
    stored(server, "j1", "FINISHED:ABNORMAL", submitted=1.0)
    stored(server, "j2", "FINISHED:COMPLETED", submitted=2.0)
    stored(server, "j3", "FINISHED:ABNORMAL", name="liver")
    assert states(server) == {"j2": "finished", "j3": "abnormal"}


def test_an_end_is_told_for_a_day(server):
    stored(server, "j1", "FINISHED:ABNORMAL", days=1.1)
    stored(server, "j2", "SUBMITTED", name="liver", days=9)
    assert states(server) == {"j2": "submitted"}


def test_a_running_job_without_a_process_is_stalled_and_one_that_failed_is_abnormal(server):
    stored(server, "j1", "RUNNING")
    events(server, "j1", {"event": "round_started", "round": 1, "rounds": 3}, age=600)
    stored(server, "j2", "FINISHED:COMPLETED", name="liver")
    events(server, "j2", {"event": "failed", "message": "no site answered"})
    assert states(server) == {"j1": "stalled", "j2": "abnormal"}


def test_a_job_that_waits_for_approval_says_so_until_it_is_approved_or_gone(kit):
    origin = Origin(name="brain", asked=1.0)
    entry = kit.job_book().note(RunConfig(), "j1", origin)
    assert states(kit) == {}  # no process waits
    events(kit, "j1", {"event": "warning", "text": "none"})
    assert states(kit) == {"j1": "approval"}
    kit.job_book().judge(entry.hash, "approved")
    assert states(kit) == {"j1": "running"}


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
    assert run("site", "watch", server.path, "--once")[1].startswith("brain (j0): finished; fetch it with")
    stored(server, "j1", "RUNNING", submitted=1.0)
    events(server, "j1", {"event": "round_started", "round": 1, "rounds": 3}, age=600)
    assert run("site", "watch", server.path, "--once")[1].startswith("j1: ")
    stored(server, "j2", "FINISHED:COMPLETED", submitted=2.0)
    assert run("site", "watch", server.path, "--once")[1].startswith("brain (j2): finished; fetch it with")


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
