"""Normalisation by modality: the values, where a plan decides it, and what a method makes of it."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from asked_plans import asked, prints_of
from running import TINY_NETWORK

from medfedaug.config.plan import Plan
from medfedaug.config.run import BY_PLAN, RunConfig
from medfedaug.data.preparation.preparation import ModalityNormalisation
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, MedFedAugWarning, UpdateRefused
from medfedaug.federation.composition import Composition
from medfedaug.federation.planning.fingerprint import check_fingerprint, fingerprint, is_ct
from medfedaug.federation.planning.planner import make_plan
from medfedaug.methods import parse_methods

CT = (-100.0, 200.0, 40.0, 50.0)
VOLUME = ((64, 64, 32), (1.0, 1.0, 2.0), 12)


@pytest.fixture
def tomograms(make_site, tmp_path) -> Path:
    """Two sites of volumes in Hounsfield units, whose foreground has intensities of its own."""
    for site in "AB":
        folder = make_site(site)
        content = json.loads((folder / "dataset.json").read_text())
        (folder / "dataset.json").write_text(json.dumps({**content, "channel_names": {"0": "CT"}}))
        rng = np.random.default_rng(ord(site))
        for entry in content["training"] + content["validation"] + content["test"]:
            label = nibabel.load(folder / entry["label"])
            inside = np.asarray(label.dataobj) > 0
            image = rng.normal(-500, 300, inside.shape)
            image[inside] = rng.normal(60 if site == "A" else 80, 20, inside.sum())
            affine = np.diag([1, 1, 2, 1.0])
            nibabel.save(nibabel.Nifti1Image(image.astype(np.float32), affine), folder / entry["image"])
            nibabel.save(nibabel.Nifti1Image(inside.astype(np.uint8), affine), folder / entry["label"])
    return tmp_path / "data"


@pytest.mark.parametrize("spatial", [(5, 4), (5, 4, 3)])
def test_each_channel_is_normalised_by_its_word(spatial):
    image = torch.randn(4, *spatial, generator=torch.Generator().manual_seed(0)) * 300 + 50
    image[3] = 0  # a channel that the site does not have
    before = image.clone()
    plan = Plan(normalisation=("ct", "z_score", "none", "z_score"), ct_intensities=CT)
    normalised = ModalityNormalisation(plan, 4)(image)
    assert torch.equal(image, before)
    x = before.double().numpy()
    low, high, mean, deviation = CT
    expected = (np.clip(x[0], low, high) - mean) / deviation
    np.testing.assert_allclose(normalised[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(normalised[1], (x[1] - x[1].mean()) / x[1].std(), rtol=1e-4, atol=1e-5)
    assert torch.equal(normalised[2], before[2])
    assert not normalised[3].any()
    # One word counts for all channels.
    each = ModalityNormalisation(Plan(normalisation=("ct",), ct_intensities=CT), 2)(image[:2])
    twice = Plan(normalisation=("ct", "ct"), ct_intensities=(*CT, *CT))
    assert torch.equal(each, ModalityNormalisation(twice, 2)(image[:2]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"normalisation": ("ct",)}, "ct_intensities has 0 numbers; normalisation ct needs 4"),
        ({"ct_intensities": CT}, "ct_intensities has 4 numbers; normalisation null needs 0"),
        ({"normalisation": ("ct",), "ct_intensities": (5, 1, 2, 3)}, "low below high"),
        ({"normalisation": ("ct",), "ct_intensities": (1, 5, 2, 0)}, "a positive standard deviation"),
        ({"normalisation": ("mri",)}, "normalisation"),
        ({"normalisation": "ct"}, "normalisation must be a list, got"),
    ],
)
def test_a_plan_that_cannot_normalise_is_one_line(values, message):
    with pytest.raises(ConfigError, match=message):
        Plan(**values)


def test_one_word_for_each_channel_or_for_all():
    plan = Plan(normalisation=("z_score", "none"))
    assert RunConfig(plan=plan, in_channels=2).input_intensity(normalised=False) == "raw"
    with pytest.raises(ConfigError, match="normalisation has 2 words, and images have 3 channels"):
        RunConfig(plan=plan, in_channels=3)
    off = RunConfig(plan=Plan(normalisation=("none",)))
    assert off.input_intensity(normalised=False) == "scale"


def test_a_method_that_normalises_takes_the_place_of_the_plan():
    plan = Plan(normalisation=("z_score",))
    config = RunConfig(methods=tuple(parse_methods("fedrdn")), plan=plan)
    with pytest.warns(MedFedAugWarning, match="fedrdn normalises the images; the plan's normalisation"):
        composition = Composition(config)
    assert composition.input == {"scaling": "each volume", "normalised_by": "fedrdn"}
    assert not composition.task().preparation.plan.normalises
    assert Composition(RunConfig(plan=plan)).input == {"scaling": "none", "normalised_by": BY_PLAN}


@pytest.mark.parametrize(("name", "expected"), [("CT", True), ("ct", True), ("T2", False), ("ct1", False)])
def test_the_modality_is_the_name_of_the_channel(name, expected):
    assert is_ct(name) == expected


def test_a_plan_that_is_made_normalises_by_the_names_of_the_channels():
    def planned(names, located=True, **changes):
        size, edges, cases = VOLUME
        prints = prints_of(A=(size, edges if located else (0.0, 0.0, 0.0), cases), B=VOLUME, C=VOLUME)
        for entries, high in zip(prints.values(), (200.0, 300.0, 900.0), strict=True):
            entries["ct"] = torch.tensor([[-100.0, high, 80.0, 40.0]] * max(1, len(names)))
        return make_plan(prints, asked(memory=1.0, **TINY_NETWORK, channel_names=names, **changes))

    plan = planned(("CT",)).changes["plan"]
    assert (plan.normalisation, plan.ct_intensities) == (("ct",), (-100.0, 300.0, 80.0, 40.0))
    plan = planned(("T1", "CT"), in_channels=2).changes["plan"]
    assert (plan.normalisation, len(plan.ct_intensities)) == (("z_score", "ct"), 4)
    for changes, why in (
        ({"names": ()}, "channels have no names"),
        ({"names": ("CT",), "located": False}, "as photographs"),
        ({"names": ("CT",), "intensity": "raw"}, "--intensity raw is asked for"),
    ):
        suggestion = planned(**changes)
        assert suggestion.changes["plan"].normalisation is None
        assert any(key == "normalisation none" and why in text for key, text in suggestion.reasons)
    kept = planned(("CT",), given=["normalisation"], plan=Plan(normalisation=("none",))).changes["plan"]
    assert (kept.normalisation, kept.ct_intensities) == (("none",), None)


def test_a_site_tells_of_its_foreground_in_tomograms_alone(tomograms):
    site = VolumeFolder.open(tomograms / "A").with_channels(("CT",))
    numbers = fingerprint(site, site.classes)["ct"][0].double().numpy()
    inside = []
    for case in site.cases["training"]:
        image, label = site.load_case(case)
        inside.append(image[0][label[0] > 0].double().numpy())
    values = np.concatenate(inside)
    quantiles = np.mean([np.quantile(one, (0.005, 0.995)) for one in inside], axis=0)  # over patients
    expected = [*quantiles, values.mean(), values.std()]
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)
    named = VolumeFolder.open(tomograms / "A")
    object.__setattr__(named, "channel_names", ("T1",))
    assert not fingerprint(named, named.classes)["ct"].any()


def test_a_site_that_sends_nonsense_is_named():
    good = prints_of(A=VOLUME)["A"]
    for wrong in ([5.0, 1.0, 3.0, 1.0], [0.0, 1.0, 0.5, -1.0], [0.0, 1e7, 5.0, 1.0]):
        with pytest.raises(UpdateRefused, match="plan/ct"):
            check_fingerprint("B", {**good, "ct": torch.tensor([wrong])})
