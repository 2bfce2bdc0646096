"""A hospital whose machine is switched off in the middle of a job, with the processes of a deployment."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hospitals import Deployment, Hospital
from rehearsed_hospitals import HOSPITALS, SERVER, Rehearsal
from running import command

from medfedaug.config.run import RunConfig
from medfedaug.nvflare_jobs.kit.job_states import stored_jobs
from medfedaug.nvflare_jobs.kit.kit import open_kit

FAULTS = Path(__file__).parents[1] / "support/faults"
STAYS, AWAY = HOSPITALS[:2]


@contextmanager
def deployed(tmp_path: Path, *hospitals: str) -> Iterator[Rehearsal]:
    """Provisioned hospitals, of which one takes a minute for a few steps of round 2."""
    with Rehearsal(tmp_path / "work", hospitals=hospitals) as system:
        system.provision()
        system.make_data()
        system.configure(forbid_code=True)
        system.environment["PYTHONPATH"] = str(FAULTS)
        system.environment["MEDFEDAUG_FAULT_MARKS"] = str(system.work)
        system.environment["MEDFEDAUG_FAULTS"] = json.dumps([[AWAY, "train", 2, "hang halfway", 60]])
        system.start_kits()
        yield system
        system.shut_down()


@pytest.mark.slow
def test_a_rebooted_hospital_goes_on_with_its_job(tmp_path):
    with deployed(tmp_path, STAYS, AWAY) as system:
        check_goes_on(system)


@pytest.mark.slow
def test_the_others_go_on_without_one_that_is_down_and_a_server_that_was_down_lets_its_jobs_go(tmp_path):
    with deployed(tmp_path, STAYS, AWAY, HOSPITALS[2]) as system:
        limits = ("--min-sites", "2", "--round-timeout", "7200", "--rounds", "4")
        job = system.submit(system.export("without_one", "fedrdn,fedfa+", *limits))
        system.await_event(job, event="trained", round=2, site=STAYS)
        system.switch_off(AWAY)
        system.await_event(job, event="away", site=AWAY, timeout=120)
        system.await_event(job, event="round_finished", round=3)
        system.wait(job)
        results = json.loads((system.collect(job) / "results.json").read_text())
        for entry in results["rounds"][1:]:
            assert {site for site, metrics in entry["sites"].items() if "samples" in metrics} == {
                STAYS,
                HOSPITALS[2],
            }
            assert entry["missing"]
            assert all(AWAY in trouble["reason"] for trouble in entry["missing"])
        assert "not heard from" in results["rounds"][1]["missing"][0]["reason"]
        assert AWAY in results["test"]["missing"]

        # The server's machine: NVFlare cannot continue the job, and nobody waits for it.
        system.switch_on(AWAY)
        system.wait_for_clients()
        job = system.submit(system.export("lost", "fedrdn,fedfa+", *limits))
        system.await_event(job, event="round_started", round=1)
        system.switch_off(SERVER)
        system.until(lambda: "dead" in watched(system, SERVER), "watch lets no dead job go")
        assert "--resume" in watched(system, SERVER)
        system.switch_on(SERVER)
        assert "FINISHED:ABNORMAL" in system.outcome(job)
        statuses = {one.job: one.status for one in stored_jobs(open_kit(system.kit(SERVER)))}
        assert statuses[job] == "FINISHED:ABNORMAL"
        assert [*statuses.values()].count("FINISHED:COMPLETED") == 1
        system.wait_for_clients()  # which the server can shut down then


def watched(system: Rehearsal, name: str) -> str:
    return " ".join(command("site", "watch", system.kit(name), "--once")[1].split())


def check_goes_on(system: Rehearsal) -> None:
    # All hospitals are needed: the server notices within a minute, says so, and waits.
    job = system.submit(system.export("rebooted", "fedrdn,fedfa", "--round-timeout", "7200"))
    system.await_event(job, event="trained", round=2, site=STAYS)
    system.switch_off(AWAY)
    away = system.await_event(job, event="away", site=AWAY, timeout=120)
    assert away["seconds"] <= 60
    system.await_event(job, event="waiting", sites=[AWAY])
    shown = watched(system, SERVER)
    assert f"stalled: waiting for {AWAY}" in shown
    assert f"{AWAY}: not heard from" in shown
    assert ", about" not in shown, "no time is left of a job that stands still"
    system.until(lambda: "startup/start.sh brings" in watched(system, AWAY), "the site's watch says nothing")
    session = system.kit(AWAY) / job / "medfedaug/session.json"
    assert session.stat().st_mode & 0o077 == 0

    system.switch_on(AWAY)
    system.await_event(job, event="returned", site=AWAY)
    system.wait(job)
    folder = system.collect(job)
    results = json.loads((folder / "results.json").read_text())
    assert [set(entry["sites"]) for entry in results["rounds"]] == [{STAYS, AWAY}] * 3
    assert [entry["missing"] for entry in results["rounds"]] == [[]] * 3
    # Nothing that stands for the site is left when the job is over.
    assert list(system.kit(AWAY).rglob("session.json")) == []
    # It repeated the round, to the same bits as if nothing had happened. Hospitals with a policy send other
    # statistics of FedFA than sites of a simulation.
    rules = {"privacy": {"min_images": 4}}
    hospitals = [Hospital(system.work / "whole" / name, path, **rules) for name, path in system.data.items()]
    whole = Deployment(hospitals).run(RunConfig.from_dict(results["config"]))
    last = torch.load(folder / "final_model.pt", weights_only=True)
    assert all(torch.equal(last[key], whole.state[key]) for key in last)
