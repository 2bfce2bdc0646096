"""Numbers of a kit for Prometheus, and the rules that raise alerts from them."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from medfedaug.nvflare_jobs.kit.job_states import METRICS
from medfedaug.nvflare_jobs.kit.kit_process import ProcessRecord

RULES = Path(__file__).resolve().parents[3] / "deploy/prometheus"


def promtool(*arguments, text=None):
    program = shutil.which("promtool")
    if not program:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def job(kit, *events) -> None:
    """The events that a job's process wrote in a kit."""
    path = kit.path / "3c1f-job" / "medfedaug" / "events.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    path.with_name("alive").touch()


@pytest.fixture
def metrics(run, tmp_path):
    def written(kit) -> str:
        file = tmp_path / "kit.prom"
        code, _, err = run("site", "watch", kit.path, "--once", "--prometheus", file)
        assert code == 0, err
        assert file.stat().st_mode & 0o044, "another user runs the collector"
        return file.read_text()

    return written


def number(text, name, **labels):
    (found,) = [
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(f"medfedaug_{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items())
    ]
    return found


def test_a_server_has_the_refusals_of_its_job(server, metrics):
    job(
        server,
        {"event": "round_started", "round": 1, "rounds": 5},
        {"event": "refused", "round": 1, "reason": "site B: a key is missing"},
    )
    text = metrics(server)
    assert number(text, "job_refusals_total", job="3c1f-job") == 1
    assert promtool("check", "metrics", text=text) == (0, "")


def test_a_site_has_the_servers_last_answer_and_the_state_of_its_job(kit, metrics):
    job(kit, {"event": "not_answered", "task": "train", "reason": "the disk is full"})
    now = time.time()
    ProcessRecord(os.getpid(), now, now, heard=1234.0).save(kit.path)
    text = metrics(kit)
    assert number(text, "server_heard_timestamp_seconds", kit=kit.name) == 1234
    assert number(text, "job_state", state="running") == 1
    assert number(text, "job_state", state="stalled") == 0
    assert number(text, "kit_up") == 1
    assert promtool("check", "metrics", text=text) == (0, "")


def test_a_kit_whose_process_wrote_no_record_lately_is_down(kit, metrics):
    ProcessRecord(os.getpid(), 1.0, time.time() - 600).save(kit.path)
    assert number(metrics(kit), "kit_up") == 0


def test_rules_are_sound():
    for check in (("check", "rules", RULES / "rules.yml"), ("test", "rules", RULES / "rules_test.yml")):
        code, printed = promtool(*map(str, check))
        assert code == 0, printed


def test_rules_name_numbers_that_there_are():
    expressions = re.findall(
        "expr: (?:>-\n)?((?:.|\n)*?)\n +(?:for|labels):", (RULES / "rules.yml").read_text()
    )
    named = {name for text in expressions for name in re.findall(r"\bmedfedaug_(\w+)", text)}
    assert named == set(METRICS)
