"""The two deployments of `docs/deploy.md`, step by step as a person would go, on this machine."""

import json
import re
import subprocess
import time

import pytest
from orthanc import free_port
from rehearsal import rehearse_own_keys, rehearse_poc, rehearse_provisioned
from rehearsal_processes import left_running
from rehearsed_hospitals import HOSPITALS, SERVER, Rehearsal

from medfedaug.errors import RunFailed
from medfedaug.nvflare_jobs.provisioning.project import project_file


def check_job(report) -> None:
    """All hospitals took part in all rounds, and the model scores at a site what the test said."""
    results = report["results"]
    assert [method["name"] for method in results["config"]["methods"]] == ["fedrdn", "fedfa", "fedfa_h"]
    assert len(results["rounds"]) == 3
    for entry in results["rounds"]:
        assert set(entry["sites"]) == set(HOSPITALS)
        assert {"model", "fedfa", "fedfa_h"} <= set(entry["bytes"])
    assert results["bytes_up_before_training"]["fedrdn"] > 0
    assert results["test"]["mean"]["dice"] > 0.1
    assert report["scores"]["dice"] == pytest.approx(results["test"]["sites"][HOSPITALS[0]]["dice"])


def check_masked(masked, hospitals) -> None:
    """The job waited for approval, and the server has learnt sums, means of scores and no name."""
    assert "under secure aggregation" in masked["page"]
    results = masked["results"]
    assert [method["name"] for method in results["config"]["methods"]] == ["fedfa", "fedfa_h"]
    for entry in results["rounds"]:
        assert set(entry["methods"]["masks"]["summed"]) == hospitals
        assert {"model", "masks"} <= set(entry["bytes"])
        assert not {"fedfa", "fedfa_h"} & {name for name, n in entry["bytes"].items() if n["up"]}
    ledger = [line for line in masked["ledger"].splitlines() if masked["job"] in line]
    assert any("model masked weights and statistics" in line for line in ledger)
    assert not any("model weights" in line or "fedfa statistics" in line for line in ledger)


@pytest.mark.slow
def test_poc_from_empty_folders_to_an_evaluated_model_a_killed_site_and_a_killed_server(tmp_path):
    report = rehearse_poc(tmp_path / "work")
    print(json.dumps(report["phases"], indent=1))
    check_job(report)
    for entry in report["killed"]["rounds"]:
        assert set(entry["sites"]) == set(HOSPITALS), "the killed site is missing"
    assert [entry["round"] for entry in report["resumed"]["rounds"]] == [1, 2, 3]
    # To the bit, as if nothing had happened.
    assert report["same"] == [True, True]
    assert left_running(tmp_path) == []


@pytest.mark.slow
def test_provisioned_hospitals_run_the_job_over_mutual_tls_and_refuse_code(tmp_path):
    report = rehearse_provisioned(tmp_path / "work")
    print(json.dumps(report["phases"], indent=1))
    check_job(report)
    assert report["doctor"].endswith("ready\n")
    assert "BYOC not permitted" in report["refusal"]
    assert report["named"] == []
    check_masked(report["masked"], set(HOSPITALS))
    assert report["kept"] == {"with": True, "without": False}
    assert left_running(tmp_path) == []


@pytest.mark.slow
def test_hospitals_that_keep_their_private_keys_run_the_job_and_stop(tmp_path):
    report = rehearse_own_keys(tmp_path / "work")
    print(json.dumps(report["phases"], indent=1))
    check_job(report)
    assert all(text.endswith("ready\n") and "not ready" not in text for text in report["doctor"])
    assert left_running(tmp_path) == []


RELAY = "relay-1"


class BelowARelay(Rehearsal):
    """One hospital connects to a relay, and the other one to the server."""

    def project(self):
        relays = {f"{RELAY}.example.org": self.hospitals[:1]}
        text = project_file(self.hospitals, port=self.port, relays=relays)
        here = f"fed_learn_port: {self.port}\n    default_host: localhost"
        text = text.replace(f"fed_learn_port: {self.port}", here)
        listening = f"default_host: localhost, port: {free_port()}"
        path = self.work / "project.yml"
        path.write_text(re.sub(r"default_host: relay-1.example.org, port: \d+", listening, text))
        return path

    def start_kits(self):
        for name in (SERVER, RELAY):
            self._start_kit(self.kit(name))
        log, deadline = self.kit(RELAY) / "log.txt", time.monotonic() + 300
        while not (log.exists() and "Started relay" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        for name in self.hospitals:
            self._start_kit(self.kit(name))
        self.wait_for_clients()


@pytest.mark.slow
def test_a_job_runs_unchanged_through_a_relay_over_mutual_tls(tmp_path):
    with BelowARelay(tmp_path / "work", hospitals=HOSPITALS[:2]) as system:
        system.provision()
        system.make_data()
        system.configure(only_ours=True)
        system.start_kits()
        job = system.submit(system.export("job", "fedrdn,fedfa+"))
        system.wait(job)
        results = json.loads((system.collect(job) / "results.json").read_text())
        assert results["job"] == job
        assert len(results["rounds"]) == 3
        assert all({*HOSPITALS[:2]} <= entry["sites"].keys() for entry in results["rounds"])
        log = (system.kit(RELAY) / "log.txt").read_text()
        assert f"SSL {HOSPITALS[0]}]" in log
        assert f"SSL {HOSPITALS[1]}]" not in log
    assert left_running(tmp_path) == []


def test_a_rehearsal_that_fails_leaves_no_process(tmp_path):
    def fail() -> None:
        with Rehearsal(tmp_path / "work") as system:
            # As a kit's start script does: a process of its own session, which nobody waits for.
            subprocess.Popen(["sleep", "600"], env=system.environment, start_new_session=True)
            deadline = time.monotonic() + 60  # it has the environment once it is another program
            while len(system.processes()) < 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(system.processes()) == 1
            system.run("sh", "-c", "exit 3")

    with pytest.raises(RunFailed, match="exit code 3"):
        fail()
    assert left_running(tmp_path) == []
