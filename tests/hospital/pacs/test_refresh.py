"""A corrected outline or image arrives, and is taken with --refresh."""

import shutil
import stat

import nibabel
import numpy as np
import pydicom
import pytest
from dicom_files import sets, write_slices
from imports import VOXELS, Site, box, write_image, write_outline

from medfedaug.data.checks import fingerprint_sites
from medfedaug.data.volumes import VolumeFolder

FIRST, SECOND = box((3, 9), (4, 9), (1, 3)), box((12, 18), (4, 9), (1, 3))
SEG = ("--labels", "seg", "--segments", "tumour*=tumour", "--label-series", "newest")


@pytest.fixture
def site(run, tmp_path):
    return Site(run, tmp_path, ("--folder", tmp_path / "in"))


def write_study(folder, patient):
    """A study with an outline; the outline's file."""
    files = write_image(folder / patient, patient)
    return write_outline(folder / f"{patient}1.dcm", files, {"Tumour": FIRST}, "20200101")


def images(site):
    return {file.name: file.read_bytes() for file in sorted((site.out / "images").iterdir())}


def test_a_corrected_outline_is_taken(site, tmp_path):
    for name in ("P", "Q"):
        write_study(tmp_path / "in", name)
    site.load(["P", "Q"], *SEG)
    before, hashes = images(site), fingerprint_sites([VolumeFolder.open(site.out)])
    files = sorted((tmp_path / "in/P").iterdir())
    write_outline(tmp_path / "in/P2.dcm", files, {"Tumour": SECOND}, "20200105")
    site.load(["P", "Q"], *SEG)
    np.testing.assert_array_equal(site.label("P"), FIRST)
    site.load(["P", "Q"], *SEG, "--refresh")
    np.testing.assert_array_equal(site.label("P"), SECOND)
    np.testing.assert_array_equal(site.label("Q"), FIRST)
    # The next job sees another set of files, of which the images are the same ones.
    assert fingerprint_sites([VolumeFolder.open(site.out)]) != hashes
    assert images(site) == before


def test_an_outline_that_is_gone_leaves_the_data_and_comes_back(site, tmp_path):
    paths = {name: write_study(tmp_path / "in", name) for name in ("P", "Q")}
    site.load(["P", "Q"], *SEG)
    case = site.entries["P"]["case"]
    kept = shutil.move(paths["P"], tmp_path / "kept.dcm")
    site.load(["P", "Q"], *SEG, code=1)
    assert case in site.rows  # reported, and untouched
    output = site.load(["P", "Q"], *SEG, "--refresh", code=1)
    assert f"taken out of the data: {case}" in output
    assert f"failed: {case}: it has no SEG" in output
    assert [*site.rows] == [site.entries["Q"]["case"]]
    assert not [*site.out.rglob(f"*{case}*")]
    shutil.move(kept, paths["P"])
    site.load(["P", "Q"], *SEG)
    np.testing.assert_array_equal(site.label("P"), FIRST)


def test_an_image_that_changed_is_taken_and_one_that_is_gone_stays(site, tmp_path):
    study = pydicom.dcmread(write_image(tmp_path / "in/P", "P")[0]).StudyInstanceUID
    site.load(["P"])
    shutil.rmtree(tmp_path / "in/P")
    write_slices(tmp_path / "in/P", VOXELS + 1, study=study, change=sets(PatientID="P"))
    site.load(["P"], "--refresh")
    (image,) = (site.out / "images").iterdir()
    np.testing.assert_array_equal(np.asarray(nibabel.load(image).dataobj), VOXELS + 1)
    shutil.rmtree(tmp_path / "in/P")
    assert "no such study" in site.load(["P"], "--refresh", code=1)
    assert len(images(site)) == 1


def test_a_study_of_another_patient_is_taken(site, tmp_path):
    """A study that was filed under a wrong patient, and corrected."""
    write_study(tmp_path / "in", "P")
    site.load(["P"], *SEG)
    for path in [file for file in (tmp_path / "in").rglob("*") if file.is_file()]:
        dataset = pydicom.dcmread(path)
        dataset.PatientID = "Q"
        dataset.save_as(path)
    case, patient = site.entries["P"]["case"], site.entries["P"]["patient"]
    site.load(["Q"], *SEG, "--refresh")
    assert [*site.entries] == ["Q"]
    assert site.rows[case]["patient"] == site.entries["Q"]["patient"] != patient


def test_what_an_import_writes_is_its_owners_alone(site, tmp_path):
    write_study(tmp_path / "in", "P")
    for more in ((), ("--refresh",)):
        site.load(["P"], *SEG, "--anonymise", *more)
    paths = [site.out, *site.out.rglob("*"), site.state, *site.state.rglob("*")]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths if path.suffix != ".lock"}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert [path for path, mode in modes.items() if path.is_file() and mode != 0o600] == []


def test_a_site_too_small_for_scores_is_told(site, tmp_path):
    names = [f"P{n}" for n in range(5)]
    for name in names:
        write_study(tmp_path / "in", name)
    output = site.load(names, *SEG)
    assert "patients: 3 training, 1 validation, 1 test" in output
    assert "fewer than 10 patients in training, validation, test: with the default policy" in output
