"""What `medfedaug site clean` removes of a kit's old jobs, and what it never removes."""

import os
import time
import uuid
from pathlib import Path

import pytest
from hospitals import Deployment, Hospital

from medfedaug.config.run import RunConfig
from medfedaug.federation import FederationServer
from medfedaug.federation.job_folder import ALIVE, JOB_FOLDER
from medfedaug.federation.protocol import run as run_protocol
from medfedaug.hospital.privacy import JobBook

DAY = 86400.0
RULES = {"privacy": {"min_images": 1}}


def age(folder: Path, days: float) -> None:
    """Let everything below a folder be as old as this."""
    when = time.time() - days * DAY
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (when, when), follow_symlinks=False)


@pytest.fixture
def federation(phantom_dir, tmp_path):
    """Two hospitals in which a job has run."""
    settings = {**RULES, "memory": 0, "cache": str(tmp_path / "cache")}
    return Deployment(
        [Hospital(tmp_path / f"kits/{n}", phantom_dir / n, **settings) for n in ("site_A", "site_B")]
    )


def finish(deployment: Deployment, config: RunConfig, *, end: bool = True) -> tuple[str, FederationServer]:
    """Run a job under an identifier as NVFlare's."""
    job = str(uuid.uuid4())
    for hospital in deployment.hospitals.values():
        hospital.start(config, job)
    server = FederationServer(config)
    run_protocol(server, deployment)
    if end:
        for hospital in deployment.hospitals.values():
            hospital.end()
    return job, server


def needed_files(kit: Path) -> dict[Path, bytes]:
    kept = [
        kit / "medfedaug/ledger.sqlite",
        kit / "medfedaug/site_A/pseudonyms.key",
        kit / "local/medfedaug.json",
    ]
    kept += [path for path in (kit / "medfedaug/site_A/jobs").iterdir() if path.suffix == ".json"]
    return {path: path.read_bytes() for path in kept}


def test_old_jobs_go_and_what_is_needed_stays(federation, tiny_config, run, tmp_path):
    kit = federation.hospitals["site_A"].kit
    config = tiny_config("fedbn", rounds=1)
    old, _ = finish(federation, config)
    (kit / "log.txt").write_text("x" * 1000)
    (kit / "medfedaug/site_A/notes.txt").write_text("the engineer's own")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (kit / str(uuid.uuid4())).symlink_to(outside)
    for folder in (kit, tmp_path / "cache"):
        age(folder, 40)
    (run_of,) = (kit / "medfedaug/site_A").glob("*.pt")
    prepared = list((tmp_path / "cache").iterdir())
    assert prepared
    recent, server = finish(federation, tiny_config("fedbn", rounds=1, seed=1))
    before = needed_files(kit)
    listed = sorted(kit.rglob("*"))

    code, out, err = run("site", "clean", kit, "--older-than", 30)
    assert code == 0, err
    assert sorted(kit.rglob("*")) == listed  # it only says so
    for path in (kit / old, run_of):
        assert f"would go: {path} " in out
    assert f"would go: {kit / recent}" not in out
    code, out, err = run("site", "clean", kit, "--older-than", 30, "--yes")
    assert code == 0, err
    assert not (kit / old).exists()
    assert not run_of.exists()
    assert (outside / "precious").exists()
    for path in (kit / recent, kit / "log.txt", kit / "medfedaug/site_A/notes.txt", kit / "startup"):
        assert path.exists()
    assert needed_files(kit) == before
    assert "0 of" in run("site", "clean", kit, "--older-than", 30)[1]

    # What the site knows is as before, the recent run can be tested again, and a new job runs.
    assert any(old in entry.runs for entry in JobBook(kit / "medfedaug/site_A/jobs").entries())
    assert old in run("site", "ledger", kit)[1]
    hospital = federation.hospitals["site_A"]
    hospital.start(tiny_config("fedbn", rounds=1, seed=1), recent)
    again = hospital.answer(server.test())
    assert not again.error
    _, later = finish(federation, tiny_config("fedbn", rounds=1, seed=2))
    assert set(later.results()["test"]["sites"]) == {"site_A", "site_B"}


def test_nothing_of_a_job_that_runs_goes_however_old_it_is(federation, tiny_config, run, tmp_path):
    kit = federation.hospitals["site_A"].kit
    config = tiny_config("fedbn", rounds=1)
    job, _ = finish(federation, config, end=False)
    for folder in (kit, tmp_path / "cache"):
        age(folder, 400)
    (kit / job / JOB_FOLDER / ALIVE).touch()  # as the job's process does
    _, out, _ = run("site", "clean", kit, "--older-than", 1, "--yes")
    assert "0 of" in out
    assert "a job is running here" in out
    assert "1 running" in run("site", "jobs", kit)[1]
    federation.hospitals["site_A"].end()
    assert "1 ended" in run("site", "jobs", kit)[1]
    age(kit, 400)
    _, out, _ = run("site", "clean", kit, "--older-than", 1, "--yes")
    assert f"removed: {kit / job} " in out
