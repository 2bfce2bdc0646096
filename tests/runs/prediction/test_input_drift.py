"""The spacing of training images: recorded in every job, where a site lets it leave, and compared later."""

from __future__ import annotations

import json
import math

import nibabel
import numpy as np
import pytest
from finished_runs import simulated
from hospitals import Deployment, Hospital

from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.federation import FederationServer
from medfedaug.federation.messages.messages import PREPARE, Reply
from medfedaug.privacy import PrivacyLedger

FREE = {"min_cases": 1, "allow_limit": True}


def quantiles(site) -> dict[str, list[float]]:
    """Of the edges in the headers, which are in RAS already, of two digits."""
    listed = json.loads((site / "dataset.json").read_text())["training"]
    edges = [nibabel.load(site / row["image"]).header.get_zooms()[:3] for row in listed]
    found = np.quantile(np.array(edges, dtype=float), [0.1, 0.5, 0.9], axis=0, method="nearest")
    rows = [[float(f"{edge:.2g}") for edge in row] for row in found]
    return dict(zip(("low", "median", "high"), rows, strict=True))


def test_a_run_without_a_plan_records_it_and_a_wrong_spacing_is_flagged(run, tmp_path):
    data, images = tmp_path / "data", tmp_path / "images"
    make_phantom(data, sites=2, patients=4, spacings=[(8, 8, 8), (9.87, 9.87, 10)], seed=0)
    model = simulated(data, tmp_path / "run", "fedavg")
    record = json.loads((model / "results.json").read_text())
    assert "planned" not in record
    assert record["spacing"] == {site.name: quantiles(site) for site in sorted(data.glob("site_*"))}
    assert record["spacing"]["site_B"]["high"] == [9.9, 9.9, 10.0]
    images.mkdir()
    known = nibabel.load(next((data / "site_A/images").glob("*.nii.gz")))
    voxels = np.asarray(known.dataobj)
    nibabel.save(known, images / "alike.nii")
    turned = known.affine[:, [2, 0, 1, 3]]
    nibabel.save(nibabel.Nifti1Image(voxels.transpose(2, 0, 1), turned), images / "turned.nii")
    nibabel.save(nibabel.Nifti1Image(voxels, known.affine @ np.diag([4, 4, 4, 1])), images / "wrong.nii")
    arguments = ("predict", "--model", model, "--images", images, "--no-previews", "--out")
    code, _, err = run(*arguments, tmp_path / "out")
    assert code == 0, err
    told = json.loads((tmp_path / "out/predictions.json").read_text())
    assert told["compared_with_the_sites"] == ["intensity", "spacing"]
    found = {name: entry["warnings"] for name, entry in told["cases"].items()}
    assert found["alike"] == found["turned"] == []
    assert found["wrong"] == [
        "its voxels are 32 x 32 x 32 mm, a factor of 3.2 outside the sites' 8 x 8 x 8 to 9.9 x 9.9 x 10 mm"
    ]
    assert f"wrong: unlike the federation's images: {found['wrong'][0]}" in err
    # Where the sites sent no spacing.
    del record["spacing"]
    (model / "results.json").write_text(json.dumps(record))
    code, _, err = run(*arguments, tmp_path / "earlier")
    assert code == 0
    assert err.count("the run recorded nothing of its sites' spacing, which cannot be compared") == 1


@pytest.fixture
def deploy(make_site, tmp_path):
    """Three sites with eight training cases each, and what each lets leave."""
    for name in "ABC":
        make_site(name, cases=(8, 1, 1))

    def make(**policies) -> Deployment:
        return Deployment(
            [
                Hospital(tmp_path / "kits" / name, tmp_path / "data" / name, privacy=privacy, jobs=FREE)
                for name, privacy in policies.items()
            ]
        )

    return make


def test_a_site_sends_it_through_its_guard_and_ledger_or_takes_part_without(deploy, tiny_config, tmp_path):
    noise = {"noise_multiplier": 1.0, "max_epsilon": 9.0, "min_images": 1}
    deployment = deploy(A={"min_images": 8}, B={"min_images": 9}, C=noise)
    server = deployment.run(tiny_config("fedavg", rounds=1), min_sites=3)
    assert sorted(server.sites) == ["A", "B", "C"]
    assert server.results()["spacing"] == {"A": quantiles(tmp_path / "data/A")}
    for name, hospital in deployment.hospitals.items():
        ledger = PrivacyLedger(hospital.kit / "medfedaug/ledger.sqlite")
        entries = [entry.release for entry in ledger.entries()]
        (numbers,) = [e for e in entries if (e.method, e.kind) == ("task", "numbers") and "cases" in e.shape]
        assert (numbers.split, numbers.count) == ("training", 8)
        assert ("spacing" in numbers.shape.split(", ")) == (name == "A")


SOUND = {f"{level}_{axis}": 1.0 for level in ("low", "median", "high") for axis in "xyz"}


@pytest.mark.parametrize(
    "told",
    [
        *(SOUND | {"low_x": bad} for bad in (math.nan, -1.0, 0.0, 2.0, 1e9, "1", None, True, [1.0], 10**400)),
        {"low_x": 1.0},
        "spacing",
        [1.0] * 9,
        7,
    ],
    ids=lambda told: str(told)[:40],
)
def test_what_no_voxel_can_be_is_dropped_and_the_site_takes_part(tiny_config, told):
    server = FederationServer(tiny_config("fedavg"))
    server.prepare()
    assert server.accept_preparation("A", Reply(PREPARE, num_samples=4, metrics={"spacing": told}))
    assert server.accept_preparation("B", Reply(PREPARE, num_samples=4, metrics={"spacing": SOUND}))
    assert server.record.to_results()["spacing"] == {
        "B": {level: [1.0] * 3 for level in ("low", "median", "high")}
    }
