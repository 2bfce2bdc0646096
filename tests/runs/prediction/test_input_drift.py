"""The spacing of training images: recorded in every job, where a site lets it leave, and compared later."""

import json
import math

import nibabel
import numpy as np
import pytest
import torch
from hospitals import Deployment, Hospital
from running import TINY_ARGS

from medfedaug.federation import FederationServer
from medfedaug.federation.messages.messages import PREPARE, Reply
from medfedaug.hospital.privacy import PrivacyLedger
from medfedaug.runs.prediction.input_drift import DriftReference

FREE = {"allow_limit": True}


def quantiles(site) -> dict[str, list[float]]:
    """Of the edges in the headers, which are in RAS already, of two digits."""
    listed = json.loads((site / "dataset.json").read_text())["training"]
    edges = [nibabel.load(site / row["image"]).header.get_zooms()[:3] for row in listed]
    found = np.quantile(np.array(edges, dtype=float), [0.1, 0.5, 0.9], axis=0, method="nearest")
    rows = [[float(f"{edge:.2g}") for edge in row] for row in found]
    return dict(zip(("low", "median", "high"), rows, strict=True))


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
    deployment = deploy(A={"min_images": 8}, C={"epsilon": 900.0, "min_images": 1})
    network = {**TINY_ARGS, "norm": "instance"}
    server = deployment.run(tiny_config("fedavg", rounds=1, network_args=network), min_sites=2)
    assert sorted(server.sites) == ["A", "C"]
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


@pytest.mark.parametrize(("lowest", "warned"), [(0.0, False), (0.1, True)])
def test_an_empty_channel_is_unlike_sites_that_record_it(lowest, warned):
    pairs = torch.tensor([[0.2], [0.3]]), torch.tensor([[lowest], [0.2]])
    empty = {"mean": torch.tensor([0.2]), "std": torch.tensor([0.0])}
    assert bool(DriftReference(*pairs, over="image", edges=None).intensity_warnings(empty)) == warned
