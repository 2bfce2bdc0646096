"""The deployments of `docs/deploy.md`, step by step as a person would go, on this machine."""

import json

import pytest
import torch
from rehearsed_hospitals import HOSPITALS, SERVER, Rehearsal

METHODS = "fedrdn,fedfa+"


def results_in(folder) -> dict:
    return json.loads((folder / "results.json").read_text())


def run_job(system, name="job"):
    """All hospitals take part in all rounds, and the model scores at a site what the test said."""
    job = system.submit(system.export(name, METHODS))
    system.wait(job)
    folder = system.collect(job)
    results = results_in(folder)
    assert [method["name"] for method in results["config"]["methods"]] == ["fedrdn", "fedfa", "fedfa_h"]
    assert len(results["rounds"]) == 3
    for entry in results["rounds"]:
        assert set(entry["sites"]) == set(HOSPITALS)
        assert {"model", "fedfa", "fedfa_h"} <= set(entry["bytes"])
    assert results["bytes_up_before_training"]["fedrdn"] > 0
    assert results["test"]["mean"]["dice"] > 0.1
    dice = system.evaluate(folder, HOSPITALS[0])["dice"]
    assert dice == pytest.approx(results["test"]["sites"][HOSPITALS[0]]["dice"])
    return folder


def same_model(folder, other) -> bool:
    first, second = (torch.load(f / "final_model.pt", weights_only=True) for f in (folder, other))
    return all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_poc_from_empty_folders_to_an_evaluated_model_a_killed_site_and_a_killed_server(tmp_path):
    with Rehearsal(tmp_path / "work") as system:
        system.prepare_poc()
        system.make_data()
        system.configure()
        system.start_poc()
        folder = run_job(system)
        job = system.submit(system.export("killed", METHODS))
        system.kill_job_process(HOSPITALS[1], job, round_=2)
        system.wait(job)
        killed = system.collect(job)
        for entry in results_in(killed)["rounds"]:
            assert set(entry["sites"]) == set(HOSPITALS), "the killed site is missing"
        system.kill_server(system.submit(system.export("interrupted", METHODS)), round_=3)
        job = system.submit(system.export("interrupted", METHODS, resume=True))
        system.wait(job)
        resumed = system.collect(job)
        assert [entry["round"] for entry in results_in(resumed)["rounds"]] == [1, 2, 3]
        # To the bit, as if nothing had happened.
        assert [same_model(folder, other) for other in (killed, resumed)] == [True, True]
        # Not `poc stop`: it would abort the job of the killed server first, which NVFlare takes for running
        # and cannot abort.
        system.shut_down()


@pytest.mark.slow
def test_hospitals_that_keep_their_private_keys_run_the_job_over_mutual_tls_and_refuse_code(tmp_path):
    with Rehearsal(tmp_path / "work") as system:
        system.request_kits()
        system.make_data()
        system.configure(forbid_code=True)
        system.start_kits()
        for name in (SERVER, HOSPITALS[0]):
            said = system.medfedaug("site", "doctor", system.kit(name))
            assert said.endswith("ready\n")
            assert "not ready" not in said
        folder = run_job(system)
        assert "BYOC not permitted" in system.refusal(system.work / "jobs" / "job")
        masked = run_masked_job(system)
        parts = (folder.parents[1], masked.parents[1], system.kit(SERVER))
        assert [path for part in parts for path in system.named(part)] == []
        assert system.is_kept(certificate=True)
        assert not system.is_kept(certificate=False)
        system.stop_kits()


def run_masked_job(system):
    """A job under secure aggregation: it waits for approval, and the server learns sums and no name."""
    for name in HOSPITALS:
        system.configure_site(name, "--secure-only", "--approve")
    before = system.jobs_seen()
    job = system.submit(system.export("masked", "fedfa+", "--secure-aggregation"))
    assert "the server learns only sums" in system.approve(before)
    system.wait(job)
    folder = system.collect(job)
    for entry in results_in(folder)["rounds"]:
        assert set(entry["methods"]["masks"]["summed"]) == set(HOSPITALS)
        assert {"model", "masks"} <= set(entry["bytes"])
        assert not {"fedfa", "fedfa_h"} & {name for name, n in entry["bytes"].items() if n["up"]}
    ledger = system.medfedaug("site", "ledger", system.kit(HOSPITALS[0])).splitlines()
    lines = [line for line in ledger if job in line]
    assert any("model masked weights and statistics" in line for line in lines)
    assert not any("model weights" in line or "fedfa statistics" in line for line in lines)
    return folder
