"""Inspection before training: the shift against a calculation by hand, and the command on data."""

import itertools
import json
import math
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from benchmark_files import write_volume
from results import Page

from medfedaug.data.volumes import VolumeFolder
from medfedaug.research.comparison.inspection import inspect_sites
from medfedaug.research.comparison.inspection_page import differing_sites, federation_shift, inspection_record
from medfedaug.research.comparison.shift import site_shift
from medfedaug.statistics import channel_statistics


def test_the_shift_is_that_of_the_formula_written_out():
    rng = np.random.default_rng(0)
    sizes = {"A": 4, "B": 6, "C": 1}
    pairs = {site: rng.normal(k, 1 + k, (n, 2, 2)) for k, (site, n) in enumerate(sizes.items())}
    pairs["A"][:, 1, 1] = pairs["B"][:, 1, 1] = 3.0  # varies within no site, and is left out
    shift = site_shift(pairs)
    components = [(c, m) for c in range(2) for m in range(2) if (c, m) != (1, 1)]
    expected = {}
    for one, other in itertools.combinations("ABC", 2):
        total = 0.0
        for c, m in components:
            squares = sum(((v[:, c, m] - v[:, c, m].mean()) ** 2).sum() for v in pairs.values())
            within = squares / (3 + 5 + 0)
            total += (pairs[one][:, c, m].mean() - pairs[other][:, c, m].mean()) ** 2 / within
        expected[one, other] = math.sqrt(total / len(components))
    assert {pair.sites: pair.statistics for pair in shift.pairs} == pytest.approx(expected)
    assert shift.shift == pytest.approx(np.mean(list(expected.values())))
    assert [pair.chance**2 for pair in shift.pairs] == pytest.approx([1 / 4 + 1 / 6, 1 / 4 + 1, 1 / 6 + 1])


def test_what_cannot_be_compared_has_no_shift():
    one = np.ones((3, 1, 2))
    assert site_shift({"A": one}) is None
    assert site_shift({"A": one, "B": one}) is None
    assert site_shift({"A": one, "B": np.ones((3, 2, 2))}) is None
    assert site_shift({"A": one * np.nan, "B": one}) is None


@pytest.fixture
def odd_data(make_site, tmp_path):
    """A site in order and one on which nearly everything is odd; each case of it for one reason."""
    make_site("A", cases=(3, 1, 1))
    folder = make_site("B", cases=(7, 1, 2))
    plain, wide, moved = (np.diag([edge, edge, 3.0, 1.0]) for edge in (1.0, 120.0, 1.0))
    moved[:3, 3] = 40

    def volume(name, array, affine=plain):
        nib.save(nib.Nifti1Image(array, affine), folder / name)

    rng = np.random.default_rng(7)
    label = np.zeros((16, 16, 4), np.uint8)
    label[4:9, 4:9, 1:3] = 1
    images = [rng.normal(100, 20, label.shape).astype(np.float32) for _ in range(4)]
    (folder / "images/1.nii.gz").write_bytes(b"no volume")
    volume("labels/2.nii.gz", label[:, :, :3])
    volume("images/3.nii.gz", images[0])
    volume("labels/3.nii.gz", np.zeros_like(label))
    volume("images/4.nii.gz", images[1], wide)
    volume("labels/4.nii.gz", label, wide)
    volume("images/5.nii.gz", images[2])
    volume("labels/5.nii.gz", label, moved)
    (folder / "labels/6.nii.gz").unlink()
    volume("images/7.nii.gz", np.where(label > 0, np.float32(0), images[3]))
    volume("labels/7.nii.gz", label)
    shutil.copy(folder / "images/0.nii.gz", folder / "images/8.nii.gz")
    shutil.copy(tmp_path / "data/A/images/0.nii.gz", folder / "images/9.nii.gz")
    return tmp_path / "data"


def test_no_odd_file_ends_the_inspection_and_each_is_named_with_its_reason(run, odd_data, tmp_path):
    page = tmp_path / "look" / "inspect.html"
    out = run.ok("inspect", "--data", odd_data, "--out", page)
    a, b = inspect_sites(odd_data)
    assert a.odd == []
    odd = {entry.case: (entry.kind, entry.reason) for entry in b.odd if entry.case}
    for case, kind, words in (
        ("1", "file", "cannot be read as an image"),
        ("2", "file", "the label map is 16 x 16 x 3, its image 16 x 16 x 4"),
        ("3", "label", "the label map is empty"),
        ("4", "spacing", "the edge of a voxel is 120 mm"),
        ("5", "file", "the label map lies up to"),
        ("6", "file", "labels/6.nii.gz"),
        ("7", "label", "100% of the labelled voxels have no signal"),
        ("8", "split", "that of the training case 0"),
        ("9", "split", "of site A"),
    ):
        assert odd[case][0] == kind
        assert words in odd[case][1]
        assert f"odd: B, {case}: {odd[case][1]}" in out
    assert "0" not in odd
    assert any("the label of a training case is missing" in entry.reason for entry in b.odd)
    text = Page(page.read_text()).text
    assert all(reason in text for _, reason in odd.values())
    record = json.loads(page.with_suffix(".json").read_text())
    assert record["sites"]["B"]["odd"]["label"] == 2
    # What the JSON holds may be shown to others.
    assert str(odd_data) not in json.dumps(record)
    assert ".nii" not in json.dumps(record)
    assert record["sites"]["B"]["cases"] == {"training": 7, "validation": 1, "test": 2}


def test_the_numbers_are_those_of_the_files(run, phantom_dir, tmp_path):
    out = run.ok("inspect", "--data", phantom_dir, "--out", tmp_path / "p.html", "--intensity", "raw")
    record = json.loads((tmp_path / "p.json").read_text())
    for name, site in record["sites"].items():
        folder = VolumeFolder.open(phantom_dir / name)
        split = "training" if folder.trains else "test"
        expected = channel_statistics(folder.load_image(case) for case in folder.cases[split])
        assert site["mean"] == pytest.approx(expected.mean.tolist(), rel=1e-6)
        assert site["std"] == pytest.approx(expected.std.tolist(), rel=1e-6)
        images = torch.cat([folder.load_image(case).flatten() for case in folder.cases[split]]).numpy()
        (stored,) = site["percentiles_as_stored"]
        low, high = np.percentile(images, (1, 99))
        for percent, value in stored.items():
            assert value == pytest.approx(np.percentile(images, float(percent)), abs=0.02 * (high - low))
        every = [case for cases in folder.cases.values() for case in cases]
        labels = [folder.load_case(case)[1] for case in every]
        assert site["class_shares"]["lesion"] == pytest.approx(
            np.mean([float((label > 0).float().mean()) for label in labels])
        )
        assert site["cases_with_class"]["lesion"] == sum(bool(label.any()) for label in labels)
        header = nib.load(every[0].image)
        assert site["shapes"] == {"32 x 32 x 6": len(every)}
        (edges,) = site["voxel_edges_mm"]
        assert [float(edge) for edge in edges.split(" x ")] == pytest.approx(
            header.header.get_zooms(), abs=1e-3
        )
        assert site["axes"] == {"RAS": len(every)}
        assert site["patients"] == len(every)
    assert f"shift {record['shift']:.2f}" in out
    assert record["shift"] > 2 * record["shift_by_chance"]  # every scanner of the phantom is another


def test_the_shift_is_of_what_a_run_would_see(phantom_dir):
    intensity = "scale"
    for site in inspect_sites(phantom_dir, intensity=intensity):
        folder = VolumeFolder.open(phantom_dir / site.name)
        split = "training" if folder.trains else "test"
        images = [folder.load_image(case, intensity)[0].double() for case in folder.cases[split]]
        for pair, image in zip(site.pairs[:, 0], images, strict=True):
            assert pair == pytest.approx([float(image.mean()), float(image.std(correction=0))], rel=1e-5)


def test_photographs_and_one_site_alone(run, make_photos, tmp_path):
    for name in "AB":
        make_photos(name, per_class=5)
    (tmp_path / "photos/A/cat/0.png").write_bytes(b"no picture")
    out = run.ok("inspect", "--data", tmp_path / "photos", "--out", tmp_path / "p.html")
    assert "odd: A, cat/0.png:" in out
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["sites"]["B"]["class_shares"] == {"cat": 0.5, "dog": 0.5}
    assert len(record["sites"]["B"]["mean"]) == 3
    assert record["pairs"][0]["sites"] == ["A", "B"]
    run.ok("inspect", "--data", tmp_path / "photos/B", "--out", tmp_path / "p.html", "--limit", 2)
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["shift"] is None
    assert record["sites"]["B"]["cases"] == {"training": 2, "validation": 2, "test": 2}
    assert "Nothing to compare" in (tmp_path / "p.html").read_text()


def test_a_constant_channel_is_odd(make_site):
    folder = make_site("A", channels=2)
    for path in (folder / "images").iterdir():
        voxels = np.asarray(nib.load(path).dataobj).copy()
        voxels[..., 1] = 4
        write_volume(path, voxels)
    (site,) = inspect_sites(folder)
    assert [(odd.kind, odd.case) for odd in site.odd] == [("channels", "")]
    assert "channel 1 is 4 in every image" in site.odd[0].reason


def test_nothing_else_is_replaced(run, make_site, tmp_path):
    make_site("A")
    for name, words in (
        ("page.html", "not a page of medfedaug"),
        ("page.json", "exists and is not a record of inspect"),
    ):
        (tmp_path / name).write_text("{}")
        err = run.refused("inspect", "--data", tmp_path / "data", "--out", tmp_path / "page.html")
        assert words in err
        assert (tmp_path / name).read_text() == "{}"
        (tmp_path / name).unlink()
    err = run.refused("inspect", "--data", tmp_path / "nowhere", "--out", tmp_path / "page.html")
    assert "no such folder" in err
    (tmp_path / "data/A/dataset.json").unlink()
    assert "medfedaug init" in run.refused(
        "inspect", "--data", tmp_path / "data", "--out", tmp_path / "page.html"
    )
    assert not (tmp_path / "page.html").exists()


def test_a_thumbnail_is_the_slice_with_most_foreground_upright(phantom_dir):
    site = inspect_sites(phantom_dir)[0]
    row = json.loads((phantom_dir / site.name / "dataset.json").read_text())["training"][0]
    image, label = (nib.load(phantom_dir / site.name / row[key]).get_fdata() for key in ("image", "label"))
    plane = image[..., (label > 0).sum(axis=(0, 1)).argmax()].T[::-1]
    (name,) = [name for name in site.thumbnails if row["image"].endswith(f"{name}.nii.gz")]
    thumbnail = site.thumbnails[name]
    step = -(-max(plane.shape) // 96)
    assert thumbnail.dtype == np.uint8
    assert np.corrcoef(thumbnail.ravel(), plane[::-1][::step, ::step][::-1].ravel())[0, 1] > 0.98


def test_the_record_names_no_case(phantom_dir):
    text = json.dumps(inspection_record(inspect_sites(phantom_dir), None, "scale"))
    names = {path.name.split(".")[0] for path in Path(phantom_dir).rglob("*.nii.gz")}
    assert names
    assert not any(name in text for name in names)


def test_channels_are_compared_by_name_and_files_scaled_each_by_itself(make_site, tmp_path):
    """FLAIR and T2 at one site, T2 and FLAIR as files of their own at the next, T2 alone at the last."""
    channels = {"A": ["FLAIR", "T2"], "B": ["t2", "flair"], "C": ["T2"]}
    for name, names in channels.items():
        folder = make_site(name, channels=1, cases=(4, 1, 1))
        listing = json.loads((folder / "dataset.json").read_text())
        listing["channel_names"] = {str(k): channel for k, channel in enumerate(names)}
        rng = np.random.default_rng(len(names))
        for index in range(6):
            for k, channel in enumerate(names):
                level = {"flair": 100, "t2": 3000}[channel.lower()] * (1 + (name == "C"))
                voxels = rng.normal(level, 0.2 * level, (16, 16, 4)).astype(np.float32)
                write_volume(folder / f"images/{index}_{k}.nii.gz", voxels)
        for split in ("training", "validation", "test"):
            for row in listing[split]:
                stem = row["image"].split(".")[0]
                row["image"] = [f"{stem}_{k}.nii.gz" for k in range(len(names))]
        (folder / "dataset.json").write_text(json.dumps(listing))
    inspections = inspect_sites(tmp_path / "data", intensity="raw")
    assert [site.odd for site in inspections] == [[], [], []]
    shift = {pair.sites: pair.statistics for pair in federation_shift(inspections).pairs}
    assert shift["A", "B"] < 3  # the same channels in another order
    assert shift["A", "C"] > 30  # by T2 alone, which is twice as bright
    for site in inspect_sites(tmp_path / "data"):  # scaled, each channel by itself
        assert site.pairs[..., 0] == pytest.approx(0.5, abs=0.2)


@pytest.fixture
def outlined(make_site, tmp_path):
    """Three sites of six patients: `outlined(A=-40, B=-40, C=40)` adds so much to the lesion's intensity."""

    def make(**contrasts: float) -> Path:
        for name, contrast in contrasts.items():
            folder = make_site(name, cases=(4, 1, 1))
            rng = np.random.default_rng([7, *name.encode()])
            for path in sorted((folder / "images").iterdir()):
                lesion = np.asarray(nib.load(folder / "labels" / path.name).dataobj) > 0
                assert lesion.any()
                write_volume(path, rng.normal(100 + contrast * lesion, 10).astype(np.float32))
        return tmp_path / "data"

    return make


def test_foreground_that_is_darker_at_every_site_makes_none_odd(outlined):
    assert differing_sites(inspect_sites(outlined(A=-40, B=-40, C=-40))) == []


def test_a_site_whose_contrast_is_reversed_is_named_once(outlined, run, tmp_path):
    data = outlined(A=-40, B=-40, C=40)
    out = run.ok("inspect", "--data", data, "--out", tmp_path / "i.html")
    sentence = (
        "C differs from the others: lesion brighter than the background in 6 of 6 patients, "
        "elsewhere in 0 of 12."
    )
    assert " ".join(out.split()).count(sentence) == 1
    assert Page((tmp_path / "i.html").read_text()).text.count(sentence) == 1
    found = json.loads((tmp_path / "i.json").read_text())["differing"]
    assert {odd["site"] for odd in found} == {"C"}  # its images are brighter too
    assert "lesion" in {odd["what"] for odd in found}


def test_images_of_one_patient_count_once(outlined):
    data = outlined(A=-40, B=-40, C=40)
    for name in "ABC":
        path = data / name / "dataset.json"
        listing = json.loads(path.read_text())
        for split in ("training", "validation", "test"):
            for row in listing[split]:
                row["patient"] = split
        path.write_text(json.dumps(listing))
    assert differing_sites(inspect_sites(data)) == []  # 3 patients of 9 may be so by chance


def test_names_of_channels_that_the_images_do_not_have_and_wild_scales_are_odd(run, make_site, tmp_path):
    """Inspection reports before a run what the run would refuse or warn of."""
    for name in "AB":
        folder = make_site(name, cases=(3, 1, 1))
    listing = json.loads((folder / "dataset.json").read_text())
    listing["modality"] = {"0": "T1", "1": "T2"}
    (folder / "dataset.json").write_text(json.dumps(listing))
    out = run.ok("inspect", "--data", tmp_path / "data", "--out", tmp_path / "i.html")
    text = " ".join(out.split())
    assert "odd: B: dataset.json names 2 channels (T1, T2), and images are 5 with 1" in text
    record = json.loads((tmp_path / "i.json").read_text())["sites"]
    assert record["B"]["odd"]["channels"] == 1
