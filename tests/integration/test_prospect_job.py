"""A prospect as a job: its export, and a run through NVFlare's simulator."""

from __future__ import annotations

import json
from pathlib import Path
from struct import pack

import pytest
from rehearsal import SCANNER, rehearse_prospect
from rehearsal_processes import left_running
from rehearsed_hospitals import HOSPITALS, PATIENT, SERVER
from running import TINY_ARGS

from medfedaug.config.run import Execution
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.quality.image_fingerprint import entry_shapes, fingerprint_of
from medfedaug.data.sites import find_sites, open_site
from medfedaug.experiments.prospective import pilot_config, pilot_of, training_sites
from medfedaug.nvflare_jobs import MedFedAugRecipe
from medfedaug.nvflare_jobs.job.prospect import FINGERPRINTS, PAGE, RECORD
from medfedaug.nvflare_jobs.simulator.simulator import run_job
from medfedaug.simulate import configure

SITES = ("site_A", "site_B")


@pytest.mark.slow
def test_the_simulator_gives_each_site_a_page_and_the_server_the_fingerprints(tmp_path):
    data = tmp_path / "data"
    make_phantom(data, sites=2, patients=5, shape=(20, 20, 3))
    sites = find_sites(data)
    config = configure(sites, prospect=True)
    recipe = MedFedAugRecipe(config=config, min_clients=2, name="prospect")
    work = tmp_path / "work"
    output = run_job(
        recipe,
        data,
        list(SITES),
        work,
        RECORD,
        device="cpu",
        execution=Execution(threads=1),
        state_dir=tmp_path / "state",
    )
    sent = json.loads((output / FINGERPRINTS).read_text())
    assert {*sent["sites"]} == {*SITES}
    assert sent["missing"] == {}
    for site in sites:
        own = fingerprint_of(site).to_dict()["entries"]
        assert sent["sites"][site.name]["entries"] == {
            name: pytest.approx(values, abs=2e-6) for name, values in own.items()
        }
        assert {*own} == {*entry_shapes("segmentation", 2, 1)}
        (page,) = (tmp_path / "state").rglob(f"{site.name}/prospect/{PAGE}")
        assert f"Should {site.name} join?" in page.read_text()
    assert "Should we train together?" in (output / PAGE).read_text()
    assert not list(output.glob("*.pt"))
    assert not (output / "results.json").exists()


def numbers_of(folder: str) -> set[float]:
    entries = fingerprint_of(open_site(Path(folder))).entries.values()
    return {value for entry in entries for value in entry.flatten().tolist() if 0 < value < 1}


def holding(folder: Path, numbers: set[float]) -> list[Path]:
    """Files below a folder that hold one of some numbers: as text, or as a float of 4 or 8 bytes."""
    forms = [form for n in numbers for form in (f"{n:.6f}".encode(), pack("<f", n), pack("<d", n))]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [
        path for path in files if any(form in content for content in [path.read_bytes()] for form in forms)
    ]


@pytest.mark.slow
def test_provisioned_hospitals_learn_fingerprints_and_nothing_else(tmp_path):
    """One adds noise, one refuses, and one answers late, over mutual TLS."""
    pytest.importorskip("opacus")
    report = rehearse_prospect(tmp_path / "work")
    plain, noisy, refusing, late = HOSPITALS
    fields = {*entry_shapes("segmentation", 2, 1), "site", "task", "classes", "channels", "noise"}
    fields |= {"cases", "looked_at", "patients", "test_patients"}
    assert report["learnt"] == {
        plain: {noisy: sorted(fields)},
        noisy: {plain: sorted({*fields, "scanners"})},
        refusing: {},
        late: {},
    }
    assert {*report["missing"]} == {refusing, late}
    assert "from 1000 on" in report["missing"][refusing]
    assert "did not answer within 60 s" in report["missing"][late]
    assert {*report["pages"]} == {plain, noisy}
    assert "without noise" in report["pages"][plain]
    assert "with noise of deviation" in report["pages"][noisy]
    # Who sends nothing has nothing of a fingerprint in its ledger.
    for name, ledger in report["ledgers"].items():
        assert ("prospect statistics" in " ".join(ledger.split())) == (name in (plain, noisy))
    # A number of a site's own images is in no file of another site, of the server, or of the lead.
    folders = {name: Path(path) for name, path in report["folders"].items()}
    own = {name: numbers_of(folder) for name, folder in report["data"].items()}
    for site in (noisy, refusing, late):
        alone = own[site] - set().union(*(own[name] for name in HOSPITALS if name != site))
        assert len(alone) > 5
        assert [path for name in folders if name != site for path in holding(folders[name], alone)] == []
    # The search finds what is there: those who were told have the numbers of the site without noise.
    alone = own[plain] - own[noisy] - own[refusing] - own[late]
    assert {name for name in folders if holding(folders[name], alone)} == {plain, noisy, SERVER, "lead"}
    # The scanner that one hospital names is where its fingerprint is.
    scanner = SCANNER.partition("=")[2].encode()
    with_it = {
        name
        for name, folder in folders.items()
        if any(scanner in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    }
    assert with_it == {plain, noisy, SERVER, "lead"}
    for name in (SERVER, "lead"):
        content = [path.read_bytes() for path in folders[name].rglob("*") if path.is_file()]
        assert not any(PATIENT.encode() in one for one in content)
    for files in report["files"].values():
        assert not [path for path in files if path.endswith((".pt", ".nii.gz", ".npy"))]
    assert left_running(tmp_path) == []


def test_export_writes_a_job_that_trains_nothing(run, tmp_path):
    code, printed, err = run(
        "export", "--prospect", "--classes", "background,lesion", "--out", tmp_path / "job"
    )
    assert code == 0, err
    assert "nvflare job submit" in printed
    site = json.loads((tmp_path / "job/app/config/config_fed_client.json").read_text())
    (executor,) = site["executors"]
    assert executor["executor"]["args"]["config"]["prospect"] is True
    assert "prospect" in executor["tasks"]
    code, _, err = run("export", "--prospect", "--methods", "fedfa", "--out", tmp_path / "other")
    assert code == 2
    assert "leave out --methods" in err
    code, _, err = run("export", "--pilot", "--methods", "fedfa", "--out", tmp_path / "other")
    assert code == 2
    assert "--pilot goes with --prospect" in err


def test_export_announces_the_trainings_of_a_pilot(run, tmp_path):
    job = tmp_path / "job"
    code, _, err = run("export", "--prospect", "--pilot", "--classes", "background,lesion", "--out", job)
    assert code == 0, err
    for side, place in (("client", "executors"), ("server", "workflows")):
        config = json.loads((job / f"app/config/config_fed_{side}.json").read_text())
        (component,) = config[place]
        args = component.get("executor", component)["args"]["config"]
        assert (args["prospect"], args["pilot"]) == (True, ["fedavg", "single"])
        assert (args["local_epochs"], args["rounds"]) == (4, 10)


@pytest.mark.slow
def test_a_pilot_in_the_simulator_is_that_of_this_machine(tmp_path):
    """The same scores from NVFlare's controller and executors as from the engine of `prospect --pilot`."""
    data = tmp_path / "data"
    make_phantom(data, sites=2, patients=5, shape=(16, 16, 2))
    sites = training_sites(data)
    config = pilot_config(sites, "unet", None, ["rounds=3", f"network_args={json.dumps(TINY_ARGS)}"])
    here = pilot_of(config, data, sites, "cpu")
    recipe = MedFedAugRecipe(config=config, min_clients=2, name="pilot")
    output = run_job(
        recipe,
        data_dir=data,
        sites=list(SITES),
        work_dir=tmp_path / "work",
        result=RECORD,
        device="cpu",
        execution=Execution(threads=1),
        state_dir=tmp_path / "state",
    )
    pilot = json.loads((output / RECORD).read_text())["pilot"]
    assert pilot["rounds"] == here.rounds
    for site in SITES:
        for methods in ("fedavg", "single"):
            expected = here.scores[methods][site]
            assert pilot["sites"][site][methods] == pytest.approx(expected, abs=1e-6)
    assert "Measured in the pilot" in (output / PAGE).read_text()
