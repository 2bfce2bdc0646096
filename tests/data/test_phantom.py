import hashlib
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from monai.data import load_decathlon_datalist

from medfedaug.data import phantom
from medfedaug.data.phantom import Structure, make_phantom
from medfedaug.data.sites import MANIFEST
from medfedaug.errors import ConfigError
from medfedaug.research.comparison.inspection import inspect_sites
from medfedaug.research.comparison.inspection_page import federation_shift

SHAPE = (40, 40, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("phantom") / "data"
    make_phantom(out, sites=4, patients=5, shape=SHAPE, seed=3)
    return out


def voxels(path):
    return np.asarray(nib.load(path).dataobj)


def digests(folder, pattern="**/*.nii.gz"):
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.glob(pattern)
    }


def test_same_seed_gives_the_same_bytes(folder, tmp_path):
    make_phantom(tmp_path / "again", sites=4, patients=5, shape=SHAPE, seed=3)
    assert digests(tmp_path / "again") == digests(folder)
    header = next(folder.glob("site_A/images/*.nii.gz")).read_bytes()[:10]
    assert header[4:8] == bytes(4), "the gzip header holds a time"


def test_sites_and_patients_do_not_depend_on_how_many_there_are(folder, tmp_path):
    make_phantom(tmp_path / "fewer", sites=3, patients=3, shape=SHAPE, seed=3)
    fewer, more = digests(tmp_path / "fewer"), digests(folder)
    assert len(fewer) == 3 * 3 * 2
    assert fewer.items() <= more.items()
    few, many = (json.loads((f / MANIFEST).read_text())["sites"] for f in (tmp_path / "fewer", folder))
    assert few.items() <= many.items()
    for site in few:  # nor does a patient move from training to test
        for split in ("training", "validation", "test"):
            lists = [
                json.loads((f / site / "dataset.json").read_text()) for f in (tmp_path / "fewer", folder)
            ]
            assert lists[0][split] == lists[1][split][: len(lists[0][split])]


def test_monai_reads_the_lists_and_no_patient_is_in_two(folder):
    site = "site_B"
    patients = {}
    for split in ("training", "validation", "test"):
        cases = load_decathlon_datalist(str(folder / site / "dataset.json"), True, split)
        assert all(Path(case["image"]).is_file() and Path(case["label"]).is_file() for case in cases)
        assert all(Path(case["image"]).name == Path(case["label"]).name for case in cases)
        patients[split] = {Path(case["image"]).name for case in cases}
    assert [len(p) for p in patients.values()] == [3, 1, 1]
    assert len(set.union(*patients.values())) == 5


@pytest.mark.parametrize(("patients", "expected"), [(3, (1, 1, 1)), (4, (2, 1, 1)), (10, (6, 2, 2))])
def test_split_is_60_20_20_with_one_in_each(tmp_path, patients, expected):
    (site,) = make_phantom(tmp_path, sites=1, patients=patients, shape=(16, 16, 1))
    listed = json.loads((site / "dataset.json").read_text())
    assert tuple(len(listed[k]) for k in ("training", "validation", "test")) == expected
    assert (listed["numTraining"], listed["numValidation"], listed["numTest"]) == expected
    assert listed["labels"] == {"0": "background", "1": "lesion"}


def test_masks_are_lesions_inside_the_head(folder):
    for path in folder.glob("*/labels/*.nii.gz"):
        label, image = nib.load(path), nib.load(str(path).replace("labels", "images"))
        mask, intensity = np.asarray(label.dataobj), np.asarray(image.dataobj)
        assert (mask.dtype, intensity.dtype) == (np.uint8, np.int16)
        assert mask.shape == intensity.shape == SHAPE
        np.testing.assert_array_equal(label.affine, image.affine)
        assert set(np.unique(mask)) == {0, 1}
        assert mask.mean() < 0.1
        world = nib.affines.apply_affine(label.affine, np.argwhere(mask))
        # The largest head, less the 13.5 mm down to the brain, shifted by at most 4 mm, wavy by a few.
        assert (((world / (76 * 1.05, 94 * 1.05, 86 * 1.05)) ** 2).sum(1) < 1).all()
        border = np.concatenate([intensity[0].ravel(), intensity[-1].ravel()])
        assert np.median(intensity[mask == 1]) > 2 * np.median(border), path


def test_the_dial_moves_the_scanners_apart(tmp_path):
    size = {"sites": 2, "patients": 5, "shape": (32, 32, 6)}
    apart, images = [], []
    for shift in (0, 0.5, 1):
        folder = tmp_path / str(shift)
        make_phantom(folder, **size, shift=shift)
        apart.append(federation_shift(inspect_sites(folder)).shift)
        images.append(voxels(folder / "site_A/images/patient_001.nii.gz"))
    assert apart[0] < 2 < min(apart[1:])
    own = make_phantom(tmp_path / "own", **size)[0]
    assert np.array_equal(images[2], voxels(own / "images/patient_001.nii.gz"))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        make_phantom(tmp_path)
    with pytest.raises(ConfigError):
        make_phantom(tmp_path / "keep.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["keep.txt"]


def test_more_classes_label_the_same_images(folder, tmp_path):
    make_phantom(tmp_path / "data", sites=1, patients=3, shape=SHAPE, seed=3, classes=5)
    site = tmp_path / "data" / "site_A"
    assert digests(site, "images/*").items() <= digests(folder / "site_A", "images/*").items()
    names = json.loads((site / "dataset.json").read_text())["labels"]
    assert list(names.values()) == list(phantom.CLASSES)
    assert json.loads((tmp_path / "data" / MANIFEST).read_text())["arguments"]["classes"] == 5
    for path in (site / "labels").iterdir():
        labels, image = voxels(path), voxels(site / "images" / path.name)
        np.testing.assert_array_equal(labels == 1, voxels(folder / "site_A" / "labels" / path.name))
        assert set(np.unique(labels)) == set(range(5))
        # Fluid is dark in FLAIR, and grey matter brighter than white.
        medians = [np.median(image[labels == k]) for k in range(1, 5)]
        assert medians[1] < medians[3] < medians[2]
    make_phantom(tmp_path / "three", sites=1, patients=3, shape=SHAPE, seed=3, classes=3)
    for path in (tmp_path / "three/site_A/labels").iterdir():
        labels = voxels(site / "labels" / path.name)
        np.testing.assert_array_equal(voxels(path), np.where(labels < 3, labels, 0))


def test_an_inverted_site_stores_dark_what_was_bright_and_leaves_the_others_as_they_are(tmp_path):
    plain = make_phantom(tmp_path / "plain", 2, 3, (32, 32, 4), seed=1)
    turned = make_phantom(tmp_path / "turned", 2, 3, (32, 32, 4), seed=1, inverted=(False, True))
    for site, other in zip(plain, turned, strict=True):
        for file in sorted(site.glob("*/*.nii.gz")):
            one, two = (voxels(folder / file.relative_to(site)).astype(float) for folder in (site, other))
            if site.name == "site_A" or file.parent.name == "labels":
                np.testing.assert_array_equal(one, two)
            else:
                total = one + two  # gain, and twice the offset, to the rounding and the floor at 0
                assert np.ptp(total[two > 0]) <= 1
                assert np.corrcoef(one.flat, two.flat)[0, 1] < -0.99
    sites = json.loads((tmp_path / "turned" / MANIFEST).read_text())["sites"]
    assert [scanner.get("inverted", False) for scanner in sites.values()] == [False, True]


def test_structures_change_lesions_and_outlines_and_nothing_else(tmp_path):
    size = {"sites": 3, "patients": 8, "shape": (32, 32, 4), "seed": 1}
    plain = make_phantom(tmp_path / "plain", **size)
    kinds = [Structure(outline=6), Structure(outline=-6), Structure(prevalence=0)]
    other = make_phantom(tmp_path / "other", **size, structures=kinds)

    def stacked(site, kind):
        return np.stack([voxels(file) for file in sorted((site / kind).glob("*.nii.gz"))])

    (wide, narrow, without), labels = ([stacked(s, "labels") for s in sites] for sites in (other, plain))
    for changed, exact, inside in ((wide, labels[0], 1), (narrow, labels[1], -1)):
        sums = [values.reshape(8, -1).sum(axis=1).astype(int) for values in (changed, exact)]
        assert all(inside * (sums[0] - sums[1]) >= 0)
        assert inside * (sums[0].sum() - sums[1].sum()) > 0
        assert sums[0].min() > 0
    assert without.reshape(8, -1).any(axis=1).tolist() == [True] * 3 + [False] * 5
    for site in (0, 1):
        np.testing.assert_array_equal(stacked(other[site], "images"), stacked(plain[site], "images"))
    images = stacked(other[2], "images"), stacked(plain[2], "images")
    np.testing.assert_array_equal(images[0][:3], images[1][:3])
    changed = images[0] != images[1]
    assert changed[labels[2] == 1].mean() > 3 * changed[labels[2] == 0].mean()
