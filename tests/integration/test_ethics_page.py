"""The page for an ethics board says no more and no less than what a site's defaults let leave."""

from pathlib import Path

import pytest
from hospitals import Deployment, Hospital

from medfedaug.federation.messages.messages import PREPARE, TEST, TRAIN, VALIDATE
from medfedaug.hospital.privacy import LEDGER_FILE, PrivacyLedger, PrivacyPolicy
from medfedaug.metrics.base import STAYS
from medfedaug.metrics.registry import METRICS

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
            released = {metric.name for metric in METRICS.values() if metric.leaves != STAYS}
            assert set(reply.metrics) <= {"cases", "hd95", "scored_cases", *released}
            assert reply.metrics["cases"] == {}
            assert reply.metrics.get("hd95") is None
    assert {reply.task for _, reply in deployment.replies} == {PREPARE, TRAIN, VALIDATE, TEST}
    # "Everything that a site sends is first entered in its ledger"
    ledger = PrivacyLedger(deployment.hospitals["A"].kit / "medfedaug" / LEDGER_FILE)
    kinds = [entry.release.kind for entry in ledger.entries()]
    assert (kinds.count("weights"), kinds.count("scores"), kinds.count("statistics")) == (2, 3, 3)
    scored = [entry.release.shape for entry in ledger.entries() if entry.release.kind == "scores"]
    assert scored == ["dice", "dice", "dice, nsd"]  # HD95 never left, and is not listed
