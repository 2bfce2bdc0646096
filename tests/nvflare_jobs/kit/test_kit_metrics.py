"""Numbers of a kit for monitoring: what Prometheus takes, what is in them, and rules that tell somebody."""

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rehearsed_hospitals import HOSPITALS

from medfedaug.nvflare_jobs.kit.kit_metrics import Sample, exposition, kit_metrics
from medfedaug.nvflare_jobs.kit.kit_process import ProcessRecord, pid_namespace, settings_at_start

DEPLOY = Path(__file__).resolve().parents[3] / "deploy/prometheus"
SITE = HOSPITALS[0]


def promtool(*arguments, text=None):
    program = shutil.which("promtool")
    if not program:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def job(kit, *events) -> Path:
    """The events that a job's process wrote in a kit."""
    path = kit.path / "3c1f-job" / "medfedaug" / "events.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    path.with_name("alive").touch()
    return path


def value(samples, name, **labels):
    (found,) = [
        one.value for one in samples if one.name == name and labels.items() <= dict(one.labels).items()
    ]
    return found


def running(kit, **changes) -> ProcessRecord:
    now = time.time()
    record = ProcessRecord(pid=1, started=now, settings=settings_at_start(kit.path), written=now, **changes)
    record.save(kit.path)
    return record


SERVER_EVENTS = (
    {"event": "round_started", "round": 1, "rounds": 5},
    {"event": "refused", "round": 1, "reason": "site B: a key is missing"},
    {"event": "round_finished", "round": 1, "seconds": 12.5, "bytes": {}},
    {"event": "round_started", "round": 2},
)
SITE_EVENTS = (
    {
        **{"event": "answered", "round": 1, "rounds": 5, "task": "train", "scores": {"train_loss": 0.5}},
        **{"samples": 40, "seconds": 3.5, "model": 1000, "statistics": {"fedfa": 10}, "cases": 12},
    },
    {"event": "not_answered", "task": "train", "reason": "the disk is full"},
)


def test_a_server_tells_of_its_job_and_of_its_sites(server):
    job(server, *SERVER_EVENTS)
    running(server, sites={"hospital-a": 1000.0, "hospital-b": 2000.0})
    found = kit_metrics(server)
    assert value(found, "kit_up") == 1
    assert value(found, "site_heard_timestamp_seconds", site="hospital-b") == 2000
    assert (value(found, "job_round"), value(found, "job_rounds")) == (2, 5)
    assert value(found, "job_round_seconds") == 12.5
    assert value(found, "job_refusals_total") == 1


def test_a_site_tells_of_its_certificate_and_its_server(kit):
    job(kit, *SITE_EVENTS)
    running(kit, heard=1234.0)
    found = kit_metrics(kit)
    assert value(found, "job_refusals_total") == 1
    assert value(found, "server_heard_timestamp_seconds") == 1234
    days = (value(found, "certificate_expiry_timestamp_seconds", file="client.crt") - time.time()) / 86400
    assert 355 < days < 361
    assert value(found, "kit_disk_free_bytes") > 0


def test_a_process_that_died_and_one_that_needs_a_restart_are_told(kit):
    assert value(kit_metrics(kit), "kit_up") == 0
    record = running(kit)
    found = kit_metrics(kit)
    assert (value(found, "kit_up"), value(found, "kit_restart_needed")) == (1, 0)
    (kit.path / "local/privacy.json").write_text('{"scopes": []}')
    assert value(kit_metrics(kit), "kit_restart_needed") == 1
    replace(record, written=time.time() - 600).save(kit.path)
    assert value(kit_metrics(kit), "kit_up") == 0
    replace(record, stopping=True).save(kit.path)
    assert value(kit_metrics(kit), "kit_up") == 0


def test_a_process_that_was_killed_is_down_at_once_and_one_in_another_container_after_minutes(kit, run):
    ended = subprocess.Popen(["true"])
    ended.wait()
    record = replace(running(kit, heard=time.time()), pid=ended.pid, namespace=pid_namespace())
    record.save(kit.path)
    assert value(kit_metrics(kit), "kit_up") == 0
    assert run("site", "doctor", kit.path, "--health")[0] == 1
    replace(record, pid=os.getpid()).save(kit.path)
    assert run("site", "doctor", kit.path, "--health")[0] == 0
    replace(record, namespace="of another container").save(kit.path)
    assert run("site", "doctor", kit.path, "--health")[0] == 0
    assert value(kit_metrics(kit), "kit_up") == 1


def test_a_site_that_the_server_has_never_answered_does_not_work(kit, run):
    running(kit)
    code, out, _ = run("site", "doctor", kit.path, "--health")
    assert (code, "the server has not answered for" in out) == (1, True)


def test_the_file_is_whole_for_everybody_and_prometheus_takes_it(server, kit, run, tmp_path):
    job(server, *SERVER_EVENTS)
    job(kit, *SITE_EVENTS)
    running(server, sites={"hospital-a": 1000.0})
    running(kit, heard=1234.0)
    for opened in (server, kit):
        file = tmp_path / "kit.prom"
        code, _, err = run("site", "watch", opened.path, "--once", "--prometheus", file)
        assert code == 0, err
        assert file.stat().st_mode & 0o044, "another user runs the collector"
        text = file.read_text()
        assert text.endswith("\n")
        assert "images/" not in text
        assert not list(tmp_path.glob(".kit.prom*"))
        code, said = promtool("check", "metrics", text=text)
        assert (code, said) == (0, "")


def test_names_with_odd_characters_stay_one_label():
    text = exposition([Sample("site_heard_timestamp_seconds", 1.0, (("site", 'a"} 1\nx\\'),))], "k")
    assert text.splitlines()[-1] == (
        'medfedaug_site_heard_timestamp_seconds{kit="k",site="a\\"} 1\\nx\\\\"} 1'
    )
    assert "nan" not in exposition([Sample("kit_up", float("nan"))], "k").lower()


def metrics_named_in(text) -> set[str]:
    return set(re.findall(r"\bmedfedaug_(\w+)", text))


def test_rules_are_sound():
    code, said = promtool("check", "rules", str(DEPLOY / "rules.yml"))
    assert code == 0, said
    code, said = promtool("test", "rules", str(DEPLOY / "rules_test.yml"))
    assert code == 0, said


def test_rules_and_dashboard_name_numbers_that_there_are():
    from medfedaug.nvflare_jobs.kit.kit_metrics import _HELP

    dashboard = json.loads((DEPLOY / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = (DEPLOY / "rules.yml").read_text()
    for text in (*expressions, *re.findall("expr: (.*)", rules)):
        assert metrics_named_in(text) <= set(_HELP), text
