"""Hostile jobs submitted by a lead to running federations: nothing is run, and the logs say why."""

import re

import pytest
from attacks import ATTACKS, REASON, spoil
from rehearsed_hospitals import HOSPITALS, LEAD, Rehearsal

SUBMITTED = [("client", "persistor"), ("client", "function"), ("server", "function"), ("server", "executor")]


def logs(system: Rehearsal, side: str, job_id: str) -> str:
    """What was written about a job: by the sites in their kits, by the server in what the lead downloads."""
    if side == "server":
        folders = [system.work / "downloads" / job_id]
        lead = ("--startup-kit", system.kit(LEAD))
        system.nvflare("job", "download", job_id, "-o", folders[0].parent, *lead)
    else:
        folders = [system.kit(name) / job_id for name in HOSPITALS]
    files = (file for folder in folders for file in folder.rglob("*log*.txt"))
    return "\n".join(file.read_text(errors="replace") for file in files)


@pytest.mark.slow
def test_hostile_jobs_are_refused_and_write_nothing(tmp_path):
    with Rehearsal(tmp_path / "work") as system:
        system.provision()
        system.make_data()
        system.configure(forbid_code=True)
        system.start_kits()
        job = system.export("job", "fedavg")
        for side, attack in SUBMITTED:
            mark = tmp_path / f"{side}_{attack}"
            hostile = spoil(job, tmp_path / "hostile" / f"{side}_{attack}", side, ATTACKS[attack](mark))
            job_id = system.submit(hostile)
            about = system.outcome(job_id)
            print(side, attack, about[-300:])
            assert not mark.exists()
            assert "FINISHED:COMPLETED" not in about
            assert re.search(REASON, logs(system, side, job_id))
        # What is honest runs on the same kits.
        job_id = system.submit(job)
        system.wait(job_id)
        results = system.collect(job_id)
        assert (results / "global_model.pt").is_file()
        card = (results / "model_card.md").read_text()
        assert "site 1" in card
        assert not [name for name in HOSPITALS if name in card]
        assert all(name in (results / "report.html").read_text() for name in HOSPITALS)
