"""The page for an ethics board says no more and no less than what a site's defaults let leave."""

import json
from pathlib import Path

import pytest
from hospitals import Deployment, Hospital

from medfedaug.cli.console import out_console, print_scores
from medfedaug.errors import RunFailed
from medfedaug.federation.job_folder import EVENTS, JOB_FOLDER
from medfedaug.federation.messages.messages import PREPARE, TEST, TRAIN, VALIDATE
from medfedaug.hospital.privacy import LEDGER_FILE, PrivacyLedger, PrivacyPolicy

PAGE = " ".join((Path(__file__).resolve().parents[2] / "docs/howto/ethics.md").read_text().split())
ONCE = {
    "cases": "the number of cases in each part",
    "input": "how images are scaled and which channels they lack",
    "spacing": "quantiles of voxel sizes",
    "counts": "the numbers of patients and studies",
}


@pytest.fixture
def hospitals(make_site, tmp_path):
    for name in "AB":
        make_site(name, cases=(12, 10, 10))

    def make(part: str, **settings) -> list[Hospital]:
        return [Hospital(tmp_path / part / name, tmp_path / "data" / name, **settings) for name in "AB"]

    return make


def test_the_numbers_on_the_page_are_those_of_a_new_kit():
    policy = PrivacyPolicy()
    assert f"at least `min_images` patients (by default {policy.min_images})" in PAGE


def test_what_leaves_a_site_by_default_is_what_the_page_says(hospitals, tiny_config):
    deployment = Deployment(hospitals("default"))
    deployment.run(tiny_config("fedrdn,fedfa", rounds=2))
    for _, reply in deployment.replies:
        if reply.task == PREPARE:
            assert all(ONCE[key] in PAGE for key in reply.metrics)
            # "fedrdn two numbers a channel and the number of cases, once"
            sizes = {key: value.numel() for key, value in reply.payload.items()}
            assert sizes == {"fedrdn/mean": 1, "fedrdn/std": 1, "fedrdn/count": 1}
        elif reply.task == TRAIN:
            assert set(reply.metrics) <= {"val_dice", "seconds"}
            assert type(reply.metrics["seconds"]) is int
            assert reply.num_samples
            # "fedfa two numbers a channel and layer in each round"
            sizes = {key: value.numel() for key, value in reply.payload.items()}
            assert {key.rpartition("/")[2] for key in sizes} == {"mean", "std"}
            assert all(key.startswith("fedfa/") for key in sizes)
        elif reply.task in (VALIDATE, TEST):
            assert set(reply.metrics) <= {"cases", "dice", "hd95", "nsd", "scored_cases"}
            assert reply.metrics["cases"] == {}
            assert reply.metrics.get("hd95") is None
    assert {reply.task for _, reply in deployment.replies} == {PREPARE, TRAIN, VALIDATE, TEST}
    # "Everything that a site sends is first entered in its ledger"
    ledger = PrivacyLedger(deployment.hospitals["A"].kit / "medfedaug" / LEDGER_FILE)
    kinds = [entry.release.kind for entry in ledger.entries()]
    assert (kinds.count("weights"), kinds.count("scores"), kinds.count("statistics")) == (2, 3, 3)
    scored = [entry.release.shape for entry in ledger.entries() if entry.release.kind == "scores"]
    assert scored == ["dice", "dice", "dice, nsd"]  # HD95 never left, and is not listed


def test_a_site_with_fewer_patients_sends_no_statistics_and_no_score_and_everybody_is_told_why(
    hospitals, tiny_config, run, tmp_path
):
    few = {"privacy": {"min_images": 11}}
    with pytest.raises(RunFailed, match="would summarise … images"):
        Deployment(hospitals("few", privacy={"min_images": 13})).run(tiny_config("fedrdn", rounds=1))
    deployment = Deployment(hospitals("fewer", **few))
    server = deployment.run(tiny_config(rounds=1))
    for _, reply in deployment.replies:
        assert not {"val_dice", "dice"} & {k for k, v in reply.metrics.items() if v is not None}
        assert "scored_cases" not in reply.metrics
        assert "train_loss" not in reply.metrics
    entries = PrivacyLedger(deployment.hospitals["A"].kit / "medfedaug" / LEDGER_FILE).entries()
    assert not any(entry.release.kind == "scores" for entry in entries)
    reason = "fewer than 11 patients would be behind it"
    assert reason in server.results()["unvalidated"]["A"]
    assert reason in server.results()["test"]["sites"]["A"]["note"]
    # A site's own log says it, and so does the server's.
    code, out, err = run("site", "watch", deployment.hospitals["A"].kit)
    assert code == 0, err
    assert f"no score leaves: {reason}" in " ".join(out.split())
    log = tmp_path / "job" / JOB_FOLDER / EVENTS
    log.parent.mkdir(parents=True)
    log.write_text("".join(json.dumps(event) + "\n" for event in [*deployment.events, {"event": "finished"}]))
    code, out, err = run("site", "watch", tmp_path / "job")
    assert code == 0, err
    out = " ".join(out.split())
    assert f"A: no validation score: {reason}" in out
    assert f"B: tested, no score: {reason}" in out
    with out_console.capture() as printed:
        print_scores(server.results()["test"], "test", {})
    assert f"A: no score: {reason}" in " ".join(printed.get().split())
