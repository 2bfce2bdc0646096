"""A prospect as a job: its export, and a run through NVFlare's simulator."""

from __future__ import annotations

import json

import pytest

from medfedaug.config.run import Execution
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.quality.image_fingerprint import entry_shapes, fingerprint_of
from medfedaug.data.sites import find_sites
from medfedaug.experiments.simulate import configure
from medfedaug.nvflare_jobs import MedFedAugRecipe
from medfedaug.nvflare_jobs.prospect import FINGERPRINTS, PAGE, RECORD
from medfedaug.nvflare_jobs.simulator import run_job

SITES = ("site_A", "site_B")


@pytest.mark.slow
def test_the_simulator_gives_each_site_a_page_and_the_server_the_fingerprints(tmp_path):
    data = tmp_path / "data"
    make_phantom(data, sites=2, patients=5, shape=(20, 20, 3))
    found = find_sites(data)
    config = configure(found, prospect=True)
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
    told = json.loads((output / FINGERPRINTS).read_text())
    assert {*told["sites"]} == {*SITES}
    assert told["missing"] == {}
    for site in found:
        own = fingerprint_of(site).to_dict()["entries"]
        assert told["sites"][site.name]["entries"] == {
            name: pytest.approx(values, abs=2e-6) for name, values in own.items()
        }
        assert {*own} == {*entry_shapes("segmentation", 2, 1)}
        (page,) = (tmp_path / "state").rglob(f"{site.name}/prospect/{PAGE}")
        assert f"Should {site.name} join?" in page.read_text()
    assert "Should we train together?" in (output / PAGE).read_text()
    assert not list(output.glob("*.pt"))
    assert not (output / "results.json").exists()


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
    assert "trains nothing: leave out --methods" in err
