"""Planted errors in the files of a site, one in each case, as `inspect` finds them."""

import json
import shutil

import nibabel
import numpy as np
import pytest

from medfedaug.data.phantom import make_phantom
from medfedaug.research.comparison.inspection import inspect_sites


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    make_phantom(folder, sites=1, patients=16, shape=(64, 64, 12), seed=1)
    return folder / "site_A"


@pytest.fixture
def site(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "site_A")


def rows(site) -> list[dict]:
    listed = json.loads((site / "dataset.json").read_text())
    return [row for split in ("training", "validation", "test") for row in listed[split]]


def change(site, key, function, row) -> None:
    file = nibabel.load(site / row[key])
    voxels = np.asarray(file.dataobj)
    (site / row[key]).unlink()  # the copy has another one
    nibabel.save(nibabel.Nifti1Image(function(voxels).astype(voxels.dtype), file.affine), site / row[key])


def findings(site) -> list:
    (inspection,) = inspect_sites(site)
    return inspection.odd


def test_a_site_without_errors_has_no_finding(site):
    assert findings(site) == []


@pytest.mark.parametrize(
    ("key", "function", "kind", "words"),
    [
        ("label", lambda v: v[::-1], "label", "flipped along x"),
        ("label", np.ones_like, "label", "100% of the image are labelled"),
        ("image", lambda v: v.max() - v, "label", "an inverted image?"),
        (
            "image",
            lambda v: np.where(v > 0.05 * v.max(), 1.1 * v.max() - v, 0),
            "intensity",
            "another modality?",
        ),
    ],
)
def test_one_damaged_case_among_many_is_named(site, key, function, kind, words):
    row = rows(site)[3]
    change(site, key, function, row)
    odd_ones = findings(site)
    name = row["image"].split("/")[-1].removesuffix(".nii.gz")
    assert any(odd.kind == kind and words in odd.reason for odd in odd_ones), odd_ones
    assert {odd.case for odd in odd_ones} == {name}


def test_label_maps_that_two_patients_exchanged_are_named(site):
    one, other = rows(site)[2:4]
    first, second = site / one["label"], site / other["label"]
    shutil.move(first, site / "kept")
    shutil.move(second, first)
    shutil.move(site / "kept", second)
    names = {row["image"].split("/")[-1].removesuffix(".nii.gz") for row in (one, other)}
    assert {odd.case for odd in findings(site) if "another patient's label map" in odd.reason} == names


def test_an_error_of_all_label_maps_is_one_of_the_site(site):
    for row in rows(site):
        change(site, "label", lambda v: v[::-1], row)
    (odd,) = [odd for odd in findings(site) if odd.case == ""]
    assert odd.reason == "most label maps fit their images better, flipped along x"


def test_few_cases_are_not_compared(site):
    file = site / "dataset.json"
    listed = json.loads(file.read_text())
    listed["training"] = listed["training"][:1]
    file.write_text(json.dumps(listed))
    change(site, "label", lambda v: v[::-1], listed["training"][0])
    assert findings(site) == []
