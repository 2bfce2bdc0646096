"""A corrected outline arrives: changes of the archive are reported, and taken with --refresh."""

import shutil
import stat

import nibabel
import numpy as np
import pydicom
import pytest
import requests
from dicom_files import sets, write_slices
from imports import VOXELS, Site, box, write_image, write_outline
from pydicom.uid import generate_uid

from medfedaug.data.file_hashes import fingerprint_sites
from medfedaug.data.volumes import VolumeFolder

FIRST, SECOND = box((3, 9), (4, 9), (1, 3)), box((12, 18), (4, 9), (1, 3))
SEG = ("--labels", "seg", "--segments", "tumour*=tumour", "--label-series", "newest")


class Archive:
    """An archive to which a reader sends objects, by name; a folder, or Orthanc by DICOMweb or DIMSE."""

    def __init__(self, kind, orthanc, root):
        self.kind, self.orthanc, self.root = kind, orthanc, root
        self.sent = {}
        if orthanc is not None:
            orthanc.clear()
        (root / "in").mkdir()

    @property
    def source(self):
        if self.kind == "folder":
            return ("--folder", self.root / "in")
        return (
            ("--dicomweb", self.orthanc.dicomweb) if self.kind == "web" else ("--dimse", self.orthanc.dimse)
        )

    def send(self, path):
        if self.kind == "folder":
            target = self.root / "in" / path.name
            shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
        else:
            self.orthanc.put(path)

    def delete(self, path):
        if self.kind == "folder":
            (self.root / "in" / path.name).unlink()
            return
        uid = pydicom.dcmread(path).SOPInstanceUID
        url = f"{self.orthanc.url}/tools/lookup"
        (instance,) = requests.post(url, data=uid, timeout=60).json()
        requests.delete(f"{self.orthanc.url}/instances/{instance['ID']}", timeout=60).raise_for_status()


@pytest.fixture(params=["folder", "web", pytest.param("dimse", marks=pytest.mark.slow)])
def archive(request, tmp_path):
    orthanc = None if request.param == "folder" else request.getfixturevalue("orthanc")
    return Archive(request.param, orthanc, tmp_path)


@pytest.fixture
def folder(tmp_path):
    return Archive("folder", None, tmp_path)


def images(site):
    return {file.name: file.read_bytes() for file in sorted((site.out / "images").iterdir())}


def test_a_corrected_outline_is_said_and_taken(run, archive, tmp_path):
    site = Site(run, tmp_path, archive.source)
    for name in ("P", "Q"):
        files = write_image(tmp_path / f"made/{name}", name)
        archive.send(tmp_path / f"made/{name}")
        archive.send(write_outline(tmp_path / f"made/{name}1.dcm", files, {"Tumour": FIRST}, "20200101"))
    output = site.load(["P", "Q"], *SEG)
    assert "changed" not in output
    assert "changed" not in site.load(["P", "Q"], *SEG)
    before, hashes = images(site), fingerprint_sites([VolumeFolder.open(site.out)])
    case = site.entries["P"]["case"]
    corrected = write_outline(
        tmp_path / "made/P2.dcm", sorted((tmp_path / "made/P").iterdir()), {"Tumour": SECOND}, "20200105"
    )
    archive.send(corrected)
    for options in (("--dry-run",), ()):
        output = site.load(["P", "Q"], *SEG, *options)
        assert f"changed in the archive: {case}: new SEG series" in output
        np.testing.assert_array_equal(site.label("P"), FIRST)
    assert "1 of the studies changed in the archive; --refresh takes them again" in output
    site.load(["P", "Q"], *SEG, "--refresh")
    np.testing.assert_array_equal(site.label("P"), SECOND)
    np.testing.assert_array_equal(site.label("Q"), FIRST)
    # The next job sees another set of files, of which the images are the same ones.
    assert fingerprint_sites([VolumeFolder.open(site.out)]) != hashes
    assert images(site) == before
    assert "changed" not in site.load(["P", "Q"], *SEG)


def test_a_slice_that_is_gone_is_said(run, folder, tmp_path):
    site = Site(run, tmp_path, folder.source)
    files = write_image(tmp_path / "made/P", "P")
    for file in files:  # each by itself, so that one can be deleted
        folder.send(file)
    site.load(["P"])
    folder.delete(max(files, key=lambda file: pydicom.dcmread(file).InstanceNumber))
    assert "CT series of 4 objects, 5 before" in site.load(["P"])
    site.load(["P"], "--refresh")
    assert nibabel.load(next((site.out / "images").iterdir())).shape == (24, 20, 4)


def test_an_outline_that_is_gone_leaves_the_data_and_comes_back(run, archive, tmp_path):
    site = Site(run, tmp_path, archive.source)
    paths = {}
    for name in ("P", "Q"):
        files = write_image(tmp_path / f"made/{name}", name)
        archive.send(tmp_path / f"made/{name}")
        paths[name] = write_outline(tmp_path / f"made/{name}1.dcm", files, {"Tumour": FIRST}, "20200101")
        archive.send(paths[name])
    site.load(["P", "Q"], *SEG)
    case = site.entries["P"]["case"]
    archive.delete(paths["P"])
    output = site.load(["P", "Q"], *SEG, code=1)
    assert f"changed in the archive: {case}: gone SEG series" in output
    assert case in site.rows  # reported, and untouched
    output = site.load(["P", "Q"], *SEG, "--refresh", code=1)
    assert f"taken out of the data: {case}" in output
    assert f"failed: {case}: it has no SEG" in output
    assert [*site.rows] == [site.entries["Q"]["case"]]
    assert not [*site.out.rglob(f"*{case}*")]
    archive.send(paths["P"])
    site.load(["P", "Q"], *SEG)
    np.testing.assert_array_equal(site.label("P"), FIRST)


def test_a_prediction_beside_an_outline_is_no_change(run, folder, tmp_path):
    site = Site(run, tmp_path, folder.source)
    files = write_image(tmp_path / "made/P", "P")
    folder.send(tmp_path / "made/P")
    folder.send(write_outline(tmp_path / "made/1.dcm", files, {"Tumour": FIRST}, "20200101"))
    site.load(["P"], *SEG)
    folder.send(
        write_outline(tmp_path / "made/ai.dcm", files, {"Tumour": SECOND}, "20200109", algorithm="AUTOMATIC")
    )
    assert "new SEG series" in site.load(["P"], *SEG)
    site.load(["P"], *SEG, "--refresh")
    np.testing.assert_array_equal(site.label("P"), FIRST)
    assert "changed" not in site.load(["P"], *SEG)  # it is known now


def test_an_image_that_changed_is_taken_and_another_one_is_said(run, folder, tmp_path):
    site = Site(run, tmp_path, folder.source)
    files = write_image(tmp_path / "made/P", "P")
    folder.send(tmp_path / "made/P")
    study = pydicom.dcmread(files[0]).StudyInstanceUID
    site.load(["P"])
    before = images(site)
    shutil.rmtree(tmp_path / "in/P")
    write_slices(tmp_path / "in/P", VOXELS + 1, study=study, change=sets(PatientID="P"))
    output = site.load(["P"])
    assert "new CT series, gone CT series" in output
    assert images(site) == before
    site.load(["P"], "--refresh")
    assert images(site) != before
    shutil.rmtree(tmp_path / "in/P")
    assert "the study is gone" in site.load(["P"], code=1)
    assert len(images(site)) == 1


def test_a_study_of_another_patient_is_said_and_taken(run, folder, tmp_path):
    """A study that was filed under a wrong patient, and corrected."""
    site = Site(run, tmp_path, folder.source)
    study = generate_uid()
    files = write_image(tmp_path / "made/P", "P", study)
    outline = write_outline(tmp_path / "made/1.dcm", files, {"Tumour": FIRST}, "20200101")
    folder.send(tmp_path / "made/P")
    folder.send(outline)
    site.load(["P"], *SEG)
    for path in [file for file in (tmp_path / "in").rglob("*") if file.is_file()]:
        dataset = pydicom.dcmread(path)
        dataset.PatientID = "Q"
        dataset.save_as(path)
    case, patient = site.entries["P"]["case"], site.entries["P"]["patient"]
    output = site.load(["Q"], *SEG)
    assert f"changed in the archive: {case}: another patient" in output
    site.load(["Q"], *SEG, "--refresh")
    assert [*site.entries] == ["Q"]
    assert site.rows[case]["patient"] == site.entries["Q"]["patient"] != patient
    assert "changed" not in site.load(["Q"], *SEG)


def test_what_an_import_writes_is_its_owners_alone(run, folder, tmp_path):
    site = Site(run, tmp_path, folder.source)
    files = write_image(tmp_path / "made/P", "P")
    folder.send(tmp_path / "made/P")
    folder.send(write_outline(tmp_path / "made/1.dcm", files, {"Tumour": FIRST}, "20200101"))
    site.load(["P"], *SEG, "--anonymise")
    folder.send(write_outline(tmp_path / "made/2.dcm", files, {"Tumour": SECOND}, "20200102"))
    site.load(["P"], *SEG, "--anonymise", "--refresh")
    paths = [site.out, *site.out.rglob("*"), site.state, *site.state.rglob("*")]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths if path.suffix != ".lock"}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert [path for path, mode in modes.items() if path.is_file() and mode != 0o600] == []


def test_a_site_too_small_for_scores_is_told(run, folder, tmp_path):
    site = Site(run, tmp_path, folder.source)
    names = [f"P{n}" for n in range(5)]
    for name in names:
        files = write_image(tmp_path / f"made/{name}", name)
        folder.send(tmp_path / f"made/{name}")
        folder.send(write_outline(tmp_path / f"made/{name}.dcm", files, {"Tumour": FIRST}, "20200101"))
    output = site.load(names, *SEG)
    assert "patients: 3 training, 1 validation, 1 test" in output
    assert "fewer than 10 patients in training, validation, test: with the default policy" in output
