"""The evaluation job in POC mode: sites score a model that they did not train, with settings of their own."""

from __future__ import annotations

import json

import pytest
from rehearsed_hospitals import HOSPITALS, Rehearsal


@pytest.mark.slow
def test_two_hospitals_score_models_that_neither_trained_alone_with_settings_of_their_own(tmp_path):
    """Both score the global model and their own."""
    hospitals = summary, detailed = HOSPITALS[:2]
    with Rehearsal(tmp_path / "work", hospitals=hospitals) as system:
        system.prepare_poc()
        system.make_data()
        system.configure(forbid_code=True, only_ours=True)
        system.medfedaug(
            *("site", "configure", system.kit(summary), "--min-images", "2"),
        )
        checked = system.medfedaug("site", "doctor", system.kit(summary), "--offline")
        assert "each is of 2 patients or more" in " ".join(checked.replace("│", " ").split())
        system.start_poc()
        runs = {}
        for methods in ("fedavg", "single"):
            job_id = system.submit(system.export(f"job_{methods}", methods))
            system.wait(job_id)
            runs[methods] = system.collect(job_id)
        job = system.work / "jobs/evaluation"
        system.medfedaug(
            *("export", "--evaluate", runs["fedavg"], "--local", runs["single"]),
            *("--min-sites", str(len(hospitals)), "--out", job),
        )
        job_id = system.submit(job)
        system.wait(job_id)
        folder = system.collect(job_id, "evaluation.json")
        watched = " ".join(
            system.medfedaug("site", "watch", system.kit(summary)).split()
        )  # ends, since the job did
        assert "score: " in watched
        assert watched.endswith("the job has ended")
        evaluation = json.loads((folder / "evaluation.json").read_text())
        page = system.work / "page.html"
        printed = system.medfedaug("report", folder / "evaluation.json", "--out", page)
    # The same scores as in the tests of the runs, of another model and another process.
    for methods, model in (("fedavg", "global"), ("single", "local")):
        tested = json.loads((runs[methods] / "results.json").read_text())["test"]["sites"]
        for site in hospitals:
            assert evaluation["sites"][site][model]["dice"] == pytest.approx(tested[site]["dice"])
    ours, theirs = evaluation["sites"][summary], evaluation["sites"][detailed]
    assert theirs["global"]["dice"] != theirs["local"]["dice"]
    assert ours["global"]["scored_cases"] >= 2
    assert all(entry["cases"] == {} for entry in (*ours.values(), *theirs.values()))
    assert ours["global"]["against"]["local"]["difference"] is not None
    assert f"{summary}, global model: " in printed
    assert "Is the federation worth it for a site?" in page.read_text()
