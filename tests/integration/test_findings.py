"""What an attack on an earlier state found, through NVFlare as it was found; each was possible then.

That a job inverts a patient is in `tests/hospital/privacy/test_job_policy.py`, that names leave in
`tests/hospital/privacy/test_pseudonyms.py`, and what the deployed executors answer to a server that is none
of ours, or to a job that asks for threads and files, in `tests/hospital/privacy/test_job_policy.py` too.
"""

from __future__ import annotations

import json

import pytest
import torch
from robustness_script import script as script

from medfedaug.config.run import Execution
from medfedaug.errors import RunFailed
from medfedaug.federation import run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.nvflare_jobs.simulator.simulator import run_in_simulator

pytestmark = pytest.mark.slow

FREE = {"min_cases": 1, "allow_limit": True}


@pytest.fixture
def federate(tmp_path, make_site, tiny_config):
    """A run through NVFlare, whose sites keep what they know: `federate("AB", "fedrdn", limit=7)`.

    For NVFlare's simulator every run is the job `simulate_job`, so that runs over one ``state`` are one job
    for the rules that count within a job.
    """
    jobs = iter(range(100))

    def run(sites, methods="fedavg", *, cases=(8, 1, 1), min_sites=0, initial=None, state="state", **changes):
        for name in sites:
            if not (tmp_path / "data" / name).exists():
                make_site(name, shape=(32, 32, 4), cases=cases)
        work = tmp_path / f"job-{next(jobs)}"
        work.mkdir()
        output = run_in_simulator(
            *(tiny_config(methods, **changes), tmp_path / "data", list(sites), work, "cpu"),
            execution=Execution(threads=1, min_sites=min_sites),
            state_dir=tmp_path / state,
            initial=initial,
        )
        return output, json.loads((output / "results.json").read_text())

    return run


def test_a_site_that_claims_two_thousand_million_samples_has_its_share_and_no_more(
    federate, faults, script, tiny_config, tmp_path
):
    """The hostile site adds 0.01 to an entry: by how much the model moves is its share of the mean."""
    changes = {"rounds": 1, "max_share": 0.4}

    def claim(request, reply, honest):
        if request.task in ("prepare", "train"):
            reply.num_samples = 2**31 - 1

    faults(["B", "prepare", 0, "claim", 0], ["B", "train", 1, "claim", 0])
    output, results = federate("ABC", **changes)
    assert results["rounds"][0]["sites"]["B"]["samples"] == 2**31 - 1
    moved = torch.load(output / "final_model.pt", weights_only=True)
    carrier = script.hostile(claim, "B")
    plain = run_in_process(
        tiny_config(**changes), tmp_path / "data", list("ABC"), "cpu", carrier=carrier
    ).state
    key = next(iter(Composition(tiny_config()).shared))
    share = (moved[key] - plain[key]).mean().item() / 0.01
    assert share == pytest.approx(0.4, rel=1e-3)


def test_sites_that_lie_below_the_limits_are_named_and_the_others_go_on(federate, faults):
    faults(
        ["B", "prepare", 0, "false mean", 0],
        ["E", "prepare", 0, "false deviation", 0],
        ["D", "train", 1, "false feature", 0],
    )
    _, results = federate(
        *("ABCDE", "fedrdn,fedfa"), rounds=2, min_sites=2, settings={"fedfa": {"variance": "direct"}}
    )
    assert set(results["left_out"]) == {"B", "E"}
    assert "site B, fedrdn/mean: expected values" in results["left_out"]["B"]
    assert "site E, fedrdn/std: expected values" in results["left_out"]["E"]
    for entry in results["rounds"]:
        assert [one["site"] for one in entry["refused"]] == ["D"]
        assert "site D, fedfa/enc1/std: expected" in entry["refused"][0]["reason"]
    assert set(results["test"]["sites"]) >= set("AC")


def test_images_of_another_shape_and_a_million_metrics_keep_their_site_out_alone(federate, faults):
    faults(["C", "prepare", 0, "other shape", 0], ["B", "train", 1, "many metrics", 0])
    _, results = federate("ABC", "fedmix", rounds=2, min_sites=1)
    assert set(results["left_out"]) == {"C"}
    assert "fedmix/images: expected shape (None, 1, None, None), got (7, 7)" in results["left_out"]["C"]
    first, second = results["rounds"]
    assert [one["site"] for one in first["refused"]] == ["B"]
    assert "metrics: expected up to 1000 entries" in first["refused"][0]["reason"]
    assert not second["refused"]
    assert set(results["test"]["sites"]) >= set("AB")


def test_epsilon_goes_on_when_a_site_is_renamed(federate, rules_in_the_simulator, tmp_path):
    def noise(most: float) -> None:
        clip = {"intensity_mean": [0, 255], "intensity_std": [0.01, 255]}
        privacy = {"noise_multiplier": 1.0, "epsilon": most, "min_images": 1, "clip": clip}
        rules_in_the_simulator(jobs=FREE, privacy=privacy)

    noise(100.0)
    _, results = federate("AB", "fedrdn", rounds=1)
    spent = results["rounds"][0]["sites"]["A"]["privacy/epsilon"]
    noise(1.2 * spent)  # enough for one release, and not for two
    (tmp_path / "data/A").rename(tmp_path / "data/C")
    with pytest.raises(RunFailed, match="site C: privacy budget spent"):
        federate("CB", "fedrdn", rounds=1)
