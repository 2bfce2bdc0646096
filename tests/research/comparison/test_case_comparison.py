"""Planted errors in the files of a site, one in each case, as `inspect` finds them."""

from __future__ import annotations

import json
import shutil

import nibabel
import numpy as np
import pytest
import torch
from scipy import ndimage

from medfedaug.data.phantom import make_phantom
from medfedaug.research.comparison.case_comparison import measure_case, near_copies, odd_cases, small_picture
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
        ("label", lambda v: np.roll(v, 1, axis=0), "label", "moved by -"),
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


def organ(seed: int, neighbour: float = 0.0, roll: int = 0):
    """Measures of a labelled organ in a body; a brighter structure without a label may touch it."""
    rng = np.random.default_rng(seed)
    x, y, z = np.meshgrid(*map(np.arange, (72, 72, 8)), indexing="ij")
    middle, wide = 36 + rng.normal(0, 2, 2), np.array([9, 11]) + rng.normal(0, 0.7, 2)
    inside = ((x - middle[0]) / wide[0]) ** 2 + ((y - middle[1]) / wide[1]) ** 2 + ((z - 3.5) / 5) ** 2 < 1
    touches = (np.abs(x - middle[0] - wide[0] - 3) < 5) & (np.abs(y - middle[1]) < 1.2 * wide[1]) & ~inside
    body = ((x - 36) / 32) ** 2 + ((y - 36) / 30) ** 2 < 1
    image = ndimage.gaussian_filter(0.4 * body + 0.5 * inside + neighbour * touches, (0.7, 0.7, 0))
    image += rng.normal(0, 0.04, image.shape)
    labels = np.roll(inside, roll, axis=0)
    return measure_case(torch.tensor(image[None]).float(), torch.tensor(labels[None]).long())


@pytest.mark.parametrize(
    ("changed", "moved"),
    [({"neighbour": 1.5}, []), ({"roll": -1}, [3]), ({"roll": -1, "neighbour": 0.5}, [3])],
)
def test_a_label_map_is_moved_if_its_edges_are_and_not_those_of_an_organ_that_touches_it(changed, moved):
    cases = [organ(seed, **(changed if seed == 3 else {})) for seed in range(14)]
    assert [index for index, _, reason in odd_cases(cases) if "moved by" in reason] == moved


def test_label_maps_that_two_patients_exchanged_are_named(site):
    one, other = rows(site)[2:4]
    first, second = site / one["label"], site / other["label"]
    shutil.move(first, site / "kept")
    shutil.move(second, first)
    shutil.move(site / "kept", second)
    names = {row["image"].split("/")[-1].removesuffix(".nii.gz") for row in (one, other)}
    assert {odd.case for odd in findings(site) if "another one's label map" in odd.reason} == names


@pytest.mark.parametrize(
    ("function", "words"),
    [(lambda v: v[::-1], "flipped along x"), (lambda v: np.roll(v, 1, axis=1), "moved by -1")],
)
def test_an_error_of_all_label_maps_is_one_of_the_site(site, function, words):
    for row in rows(site):
        change(site, "label", function, row)
    (odd,) = [odd for odd in findings(site) if odd.case == ""]
    assert odd.reason.startswith("most label maps fit")
    assert words in odd.reason


def test_a_copy_that_was_rescaled_is_named_with_the_case_that_it_is_of(site):
    listed = json.loads((site / "dataset.json").read_text())
    source, row = listed["training"][0], listed["test"][0]

    def scaled(voxels):
        large = ndimage.zoom(voxels.astype(float), (1.02, 1.02, 1), order=1)
        return 1.01 * large[: voxels.shape[0], : voxels.shape[1]]

    for key, function in (("image", scaled), ("label", lambda v: v)):
        shutil.copy(site / source[key], site / row[key])
        change(site, key, function, row)
    (odd,) = [odd for odd in findings(site) if odd.kind == "split"]
    assert "but for its scale" in odd.reason
    assert source["image"].split("/")[-1].removesuffix(".nii.gz") in odd.reason


def photograph(seed: int) -> torch.Tensor:
    """A bright disc on black, as of a camera for the retina, lit from one side, with a texture of its own."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(*[np.linspace(-1, 1, 160)] * 2)
    texture = ndimage.gaussian_filter(rng.normal(size=(160, 160)), 2)
    disc = np.where(np.hypot(x, y) < 0.9, 1 + 0.3 * rng.normal() * x + 0.3 * texture, 0)
    return torch.tensor(disc[None, ..., None]).float()


def test_photographs_of_one_camera_are_no_copies_and_a_copy_of_one_is():
    pictures = [small_picture(photograph(seed)) for seed in range(12)]
    assert list(near_copies(pictures)) == []
    first = photograph(0)
    for changed in (first.roll((3, -3), (1, 2)), first**0.8, first + 0.01 * torch.randn_like(first)):
        assert list(near_copies([*pictures, small_picture(changed)])) == [(0, 12)]


def test_few_cases_are_not_compared(site):
    file = site / "dataset.json"
    listed = json.loads(file.read_text())
    listed["training"] = listed["training"][:1]
    file.write_text(json.dumps(listed))
    change(site, "label", lambda v: v[::-1], listed["training"][0])
    assert findings(site) == []
