"""The evaluation job in POC mode: sites score a model that they did not train, with settings of their own."""

from __future__ import annotations

import json

import pytest
from rehearsed_hospitals import HOSPITALS, Rehearsal

from medfedaug.privacy.score_release import step_of


@pytest.mark.slow
def test_two_hospitals_score_models_that_neither_trained_alone_with_settings_of_their_own(tmp_path):
    """Both score the global and the local models; one of them sends summaries alone."""
    hospitals = summary, detailed = HOSPITALS[:2]
    with Rehearsal(tmp_path / "work", hospitals=hospitals) as system:
        system.prepare_poc()
        system.make_data()
        system.configure(forbid_code=True, only_ours=True)
        system.medfedaug(
            *("site-config", "--kit", system.kit(summary), "--scores", "summary", "--min-images", "2"),
            *("--lend-models",),
        )
        checked = system.medfedaug("doctor", "--kit", system.kit(summary), "--offline")
        assert "no score of a case leaves" in " ".join(checked.replace("│", " ").split())
        system.start_poc()
        runs = {}
        for methods in ("fedavg", "single"):
            job_id = system.submit(system.export(f"job_{methods}", methods))
            system.wait(job_id)
            runs[methods] = system.collect(job_id)
        job = system.work / "jobs/evaluation"
        system.medfedaug(
            *("export", "--evaluate", runs["fedavg"], "--local", runs["single"], "--cross-site"),
            *("--min-sites", str(len(hospitals)), "--out", job),
        )
        job_id = system.submit(job)
        system.wait(job_id)
        folder = system.collect(job_id, "evaluation.json")
        watched = " ".join(system.medfedaug("watch", system.kit(summary)).split())  # ends, since the job did
        assert "score: " in watched
        assert watched.endswith("the job has ended")
        evaluation = json.loads((folder / "evaluation.json").read_text())
        page = system.work / "page.html"
        printed = system.medfedaug("report", folder / "evaluation.json", "--out", page)
    # The same scores as in the tests of the runs, of another model and another process.
    for methods, model in (("fedavg", "global"), ("single", "local")):
        tested = json.loads((runs[methods] / "results.json").read_text())["test"]["sites"]
        assert evaluation["sites"][detailed][model]["dice"] == pytest.approx(tested[detailed]["dice"])
        scored, step = evaluation["sites"][summary][model], step_of(tested[summary]["scored_cases"])
        assert scored["scored_cases"] == tested[summary]["scored_cases"]
        assert scored["dice"] == pytest.approx(step * round(scored["dice"] / step))
    ours, theirs = evaluation["sites"][summary], evaluation["sites"][detailed]
    assert theirs["global"]["dice"] != theirs["local"]["dice"]
    assert ours["global"]["scored_cases"] >= 2
    assert all(entry["cases"] == {} for entry in ours.values())
    assert theirs["global"]["cases"]
    assert ours["global"]["against"]["local"]["difference"] is not None
    # The model of the site that lends it was scored at all others, and those of the others stayed there.
    assert set(evaluation["cross_site"]["local"][summary]) == set(hospitals)
    assert set(evaluation["kept"]["local"]) == {detailed}
    assert f"{summary}, global model: " in printed
    assert "Is the federation worth it for a site?" in page.read_text()
