import json
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image

from medfedaug.data.datasets.phantom import Structure, make_phantom
from medfedaug.data.quality import image_fingerprint as fingerprints
from medfedaug.data.quality.image_fingerprint import (
    ImageFingerprint,
    entry_shapes,
    fingerprint_of,
    sample_cases,
)
from medfedaug.data.sites import open_site
from medfedaug.errors import DataError


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fingerprint") / "data"
    structures = [Structure(), Structure(outline=8, lesions=3), Structure(prevalence=0)]
    values = [{"noise": 0.2, "blur": 0.5}, {}, {"field_of_view": 400, "blur": 12}]
    inverted = (False, True, False)
    size = {"sites": 3, "patients": 8, "shape": (32, 32, 4), "seed": 1, "inverted": inverted}
    return make_phantom(folder, **size, shift=0, structures=structures, scanner_values=values)


@pytest.fixture(scope="module")
def prints(sites):
    return [fingerprint_of(open_site(site)) for site in sites]


def test_means_and_spreads_are_those_of_the_scaled_images(sites, prints):
    for site, one in zip(sites, prints, strict=True):
        listed = json.loads((site / "dataset.json").read_text())
        pairs, edges, sizes = [], [], []
        for case in listed["training"]:
            image = nib.load(site / case["image"])
            voxels = np.asarray(image.dataobj).astype(np.float64)
            scaled = (voxels - voxels.min()) / (voxels.max() - voxels.min())
            pairs.append((scaled.mean(), scaled.std()))
            edges.append(image.header.get_zooms())
            sizes.append((np.asarray(nib.load(site / case["label"]).dataobj) > 0).mean())
        pairs, sizes = np.array(pairs), np.array(sizes)
        for k, name in enumerate(("mean", "std")):
            np.testing.assert_allclose(one.value(name), pairs[:, k].mean(), rtol=1e-5)
            np.testing.assert_allclose(one.spread(name), pairs[:, k].std(), rtol=2e-3)
        np.testing.assert_allclose(one.value("edge"), np.exp(np.log(np.array(edges)[:, 0]).mean()), rtol=1e-5)
        np.testing.assert_allclose(one.value("thickness"), edges[0][2], rtol=1e-5)
        np.testing.assert_allclose(one.value("extent"), 32 * edges[0][0], rtol=1e-5)
        np.testing.assert_allclose(one.value("size"), np.exp(np.log(sizes[sizes > 0]).mean()), rtol=1e-4)
        np.testing.assert_allclose(one.value("present"), (sizes > 0).mean(), atol=1e-12)
        assert (one.cases, one.looked_at, one.patients, one.test_patients) == (4, 4, 4, 2)


@pytest.mark.parametrize("std", [0.01, 0.05])
def test_noise_is_measured_on_a_smooth_image(std):
    R = np.random.RandomState(0)
    x = np.linspace(0, 3, 64)
    smooth = 0.5 + 0.2 * np.sin(x)[:, None] * np.cos(x)[None] + R.normal(0, std, (64, 64))
    planes = torch.from_numpy(smooth)[None, None]
    assert float(fingerprints._texture(planes)["noise"]) == pytest.approx(std, rel=0.1)
    white = torch.from_numpy(R.normal(0, 1, (1, 1, 64, 64)))
    assert float(fingerprints._texture(white)["roughness"]) == pytest.approx(1, abs=0.05)


def test_json_and_back_and_no_invalid_values(prints):
    one = prints[0]
    values = json.loads(json.dumps(one.to_dict()))
    again = ImageFingerprint.from_dict(values)
    assert again.site == one.site
    for name, value in one.entries.items():
        np.testing.assert_allclose(again.entries[name], value, atol=1e-6)
    for change in (
        *({"entries": {**values["entries"], "mean": mean}} for mean in ([float("nan")], [2.0], [0.1, 0.2])),
        {"entries": {key: value for key, value in values["entries"].items() if key != "std"}},
        {"cases": -1},
        {"patients": "many"},
    ):
        with pytest.raises((ValueError, RuntimeError)) as error:
            ImageFingerprint.from_dict({**values, **change})
        assert "\n" not in str(error.value)


def test_rows_add_up_to_one_and_give_the_numbers_back(sites):
    site = open_site(sites[0])
    numbers = fingerprints.case_numbers(site, site.cases["training"][0])
    assert {name: tuple(value.shape) for name, value in numbers.items()} == entry_shapes("segmentation", 2, 1)
    for name, value in numbers.items():
        rows = fingerprints.as_rows(name, value)
        np.testing.assert_allclose(rows.sum(dim=-1), 1)
        assert bool((rows >= 0).all())
        np.testing.assert_array_equal(fingerprints.from_rows(name, rows), value)


def test_a_sample_is_stated_and_photographs_have_no_millimetres(tmp_path, sites):
    site = open_site(sites[0])
    assert fingerprint_of(site, sample_cases(site, limit=2)).looked_at == 2
    R = np.random.RandomState(0)
    for kind in ("cat", "dog"):
        folder = tmp_path / "hospital" / kind
        folder.mkdir(parents=True)
        for index in range(8 if kind == "cat" else 4):
            pixels = R.randint(0, 255, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{kind}{index}.png")
    one = fingerprint_of(open_site(tmp_path / "hospital"))
    assert one.task == "classification"
    assert one.channels == 3
    assert not one.knows_geometry
    assert "size" not in one.entries
    assert one.entries["shares"].sum() == pytest.approx(1)
    assert one.entries["shares"][0] > one.entries["shares"][1]


def test_a_site_without_training_cases_has_none(sites):
    site = open_site(sites[0])
    with pytest.raises(DataError, match="no training case"):
        fingerprint_of(replace(site, cases={**site.cases, "training": ()}))
