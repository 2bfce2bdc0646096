"""Names of real hospitals, for which NVFlare gets identifiers."""

import json
import shutil

import pytest
from running import TINY_OPTIONS

from medfedaug.nvflare_jobs.job.messages import identifiers


def test_what_is_an_identifier_stays_and_others_never_meet_it():
    found = identifiers(["Genève", "Geneve", "Ge.neve", "server", "--", "A B", "A_B"])
    assert found["Geneve"] == "Geneve"
    assert found["A_B"] == "A_B"
    assert found == {
        **{"Genève": "Geneve_2", "Geneve": "Geneve", "Ge.neve": "Ge_neve", "server": "server_2"},
        **{"--": "site", "A B": "A_B_2", "A_B": "A_B"},
    }


@pytest.mark.slow
def test_results_of_nvflare_have_the_names_of_the_hospitals(run, phantom_dir, tmp_path):
    hospitals = ["Genève", "Zürich Süd"]
    for name, source in zip(hospitals, ("site_A", "site_B"), strict=True):
        shutil.copytree(phantom_dir / source, tmp_path / "data" / name)
    out = tmp_path / "out"
    options = ("--methods", "fedbn", "--rounds", 1, "--no-report", *TINY_OPTIONS)
    code, said, err = run("simulate", "--data", tmp_path / "data", "--out", out, *options)
    assert code == 0, err
    assert "'Zürich Süd' is Zurich_Sud" in " ".join((said + err).split())
    results = json.loads((out / "results.json").read_text())
    assert sorted(results["test"]["sites"]) == hospitals
    assert all((out / "state" / name).is_dir() for name in hospitals)
