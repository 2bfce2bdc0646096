"""`medfedaug predict` from an archive, and back into it, through the command line."""

import json
import os
import signal
import stat
import subprocess
import sys
import time

import nibabel
import numpy as np
import pydicom
import pytest
import requests
from dicom_files import affine_of, write_slices
from finished_runs import FEW, balanced, simulated
from hostile_archive import Lie, changed, hostile_archive
from pydicom.uid import generate_uid

from medfedaug.data.phantom import make_phantom

hd = pytest.importorskip("highdicom", reason="pip install 'medfedaug[pacs]'")

SHAPE = (32, 32, 6)


def put(orthanc, folder, patient, count=1):
    """Store studies of a patient; their files by accession number."""
    rng, files = np.random.default_rng(len(patient)), {}
    for n in range(count):
        accession = f"{patient}-{n}"

        def named(header, k, accession=accession):
            header.PatientID, header.AccessionNumber = patient, accession

        voxels = rng.integers(0, 1000, SHAPE).astype(np.int16)
        files[accession] = write_slices(folder / accession, voxels, change=named)
    orthanc.put(folder)
    return files


def studies(path, *patients):
    path.write_text("PatientID\n" + "\n".join(patients) + "\n")
    return path


def objects(orthanc, patient):
    """All objects of a patient that are no images, by modality, as the archive has them."""
    found = {}
    url = orthanc.url
    query = {"Level": "Patient", "Query": {"PatientID": patient}}
    for one in requests.post(f"{url}/tools/find", json=query, timeout=60).json():
        for instance in requests.get(f"{url}/patients/{one}/instances", timeout=60).json():
            content = pydicom.dcmread(pydicom.filebase.DicomBytesIO(orthanc.read(instance["ID"])))
            if content.Modality != "CT":
                found.setdefault(content.Modality, []).append(content)
    return found


@pytest.mark.parametrize("way", ["dicomweb", "dimse"])
def test_seg_contours_and_report_come_back_and_refer_to_their_series(orthanc, run, model, tmp_path, way):
    patient = f"BACK-{way}"
    files = put(orthanc, tmp_path / "in", patient)[f"{patient}-0"]
    out = tmp_path / "out"
    call = ("predict", "--model", model, f"--{way}", getattr(orthanc, way), "--out", out, "--store")
    call += ("--studies", studies(tmp_path / "studies.csv", patient), "--rtstruct", "--report")
    code, said, err = run(*call)
    assert code == 0, err
    assert "stored 3 objects of 1 stud" in said
    stored = objects(orthanc, patient)
    assert {name: len(found) for name, found in stored.items()} == {"SEG": 1, "RTSTRUCT": 1, "SR": 1}
    slices = sorted(map(pydicom.dcmread, files), key=lambda one: one.InstanceNumber)
    (seg,) = stored["SEG"]
    read = hd.seg.Segmentation.from_dataset(seg)
    assert read.StudyInstanceUID == slices[0].StudyInstanceUID
    assert read.ReferencedSeriesSequence[0].SeriesInstanceUID == slices[0].SeriesInstanceUID
    sha = json.loads((out / "predictions.json").read_text())["model"]["sha256"]
    algorithm = read.SegmentSequence[0].SegmentationAlgorithmIdentificationSequence[0]
    assert (algorithm.AlgorithmName, sha in algorithm.AlgorithmParameters) == ("medfedaug", True)
    pixels = read.get_pixels_by_source_instance(
        [one.SOPInstanceUID for one in slices], assert_missing_frames_are_empty=True
    )
    mask = pixels[..., 0].astype(bool)
    assert 0 < mask.sum() < mask.size
    # The voxels that the report measures are those of the segmentation, in the headers' millimetres.
    volume = mask.sum() * abs(np.linalg.det(affine_of(slices)[:3, :3])) / 1000
    texts = str(stored["SR"][0])
    assert str(seg.SOPInstanceUID) in texts
    (case,) = json.loads((out / "predictions.json").read_text())["cases"].values()
    assert case["volume_ml"]["lesion"] == pytest.approx(volume, rel=1e-4)
    contours = stored["RTSTRUCT"][0].ROIContourSequence[0].ContourSequence
    assert {one.ContourImageSequence[0].ReferencedSOPInstanceUID for one in contours} == {
        one.SOPInstanceUID for one, plane in zip(slices, mask, strict=True) if plane.any()
    }
    own = tmp_path / "out.state/studies.json"
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
    assert patient in own.read_text()
    assert not (tmp_path / "out.state/images").exists()
    assert patient not in said + err + (out / "predictions.json").read_text()


NAMES = {
    "ISO_IR 144": "Люксембург^Роза",
    "ISO_IR 101": "Wałęsa^Łucja",
    "ISO_IR 100": "Müller-Weiß^Jürgen",
    "\\ISO 2022 IR 87": "Yamada^Tarou=山田^太郎=やまだ^たろう",
    "\\ISO 2022 IR 149": "Hong^Gildong=洪^吉洞=홍^길동",
}


def test_names_in_any_letters_come_back_from_the_archive(orthanc, run, model, tmp_path):
    patients = {f"LETTERS-{n}": pair for n, pair in enumerate(NAMES.items())}
    for patient, (characters, name) in patients.items():

        def named(header, k, patient=patient, characters=characters, name=name):
            header.SpecificCharacterSet = characters.split("\\") if "\\" in characters else characters
            header.PatientID, header.PatientName = patient, name

        voxels = np.random.default_rng(0).integers(0, 1000, (32, 32, 2)).astype(np.int16)
        write_slices(tmp_path / "in" / patient, voxels, change=named)
    orthanc.put(tmp_path / "in")
    call = ("predict", "--model", model, "--dicomweb", orthanc.dicomweb, "--store", "--rtstruct", "--report")
    call += ("--studies", studies(tmp_path / "s.csv", *patients), "--out", tmp_path / "out", "--no-previews")
    run.ok(*call)
    for patient, (_, name) in patients.items():
        found = objects(orthanc, patient)
        assert {kind: str(one.PatientName) for kind, (one,) in found.items()} == dict.fromkeys(
            ("SEG", "RTSTRUCT", "SR"), name
        )


def test_the_same_study_gets_no_second_objects(orthanc, run, model, tmp_path):
    put(orthanc, tmp_path / "in", "TWICE-1")
    call = ("predict", "--model", model, "--dicomweb", orthanc.dicomweb, "--store", "--no-previews")
    call += ("--studies", studies(tmp_path / "studies.csv", "TWICE-1"), "--report")

    def stored(out):
        said = run.ok(*call, "--out", tmp_path / out)
        found = objects(orthanc, "TWICE-1")
        return len(found["SEG"]), len(found["SR"]), "already there" in said

    assert [stored("out"), stored("out"), stored("elsewhere")] == [(1, 1, False), (1, 1, True), (1, 1, True)]
    (seg,), (report,) = objects(orthanc, "TWICE-1")["SEG"], objects(orthanc, "TWICE-1")["SR"]
    assert str(seg.SOPInstanceUID) in str(report)


def test_a_study_that_fails_costs_itself_and_names_no_patient(orthanc, run, model, tmp_path):
    put(orthanc, tmp_path / "good", "GOOD-1")
    two = put(orthanc, tmp_path / "two", "TWO-1")
    study = pydicom.dcmread(two["TWO-1-0"][0]).StudyInstanceUID
    write_slices(
        tmp_path / "more",
        np.zeros(SHAPE, np.int16),
        study=study,
        change=lambda header, k: setattr(header, "PatientID", "TWO-1"),
    )
    orthanc.put(tmp_path / "more")
    out = tmp_path / "out"
    call = ("predict", "--model", model, "--dicomweb", orthanc.dicomweb, "--out", out, "--store")
    call += ("--studies", studies(tmp_path / "studies.csv", "GOOD-1", "TWO-1", "NOBODY-1"), "--no-previews")
    code, said, err = run(*call)
    assert code == 1
    assert "stored 1 object" in said
    failed = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 2
    assert any("no such study" in line for line in failed)
    assert any("2 series are a possible image" in line for line in failed)
    assert not [name for name in ("GOOD", "TWO-1", "NOBODY", study) if name in said + err]
    assert len(objects(orthanc, "GOOD-1")["SEG"]) == 1
    assert objects(orthanc, "TWO-1") == {}


@pytest.fixture(scope="module")
def two_channels(tmp_path_factory):
    """A run of volumes of two channels."""
    root = tmp_path_factory.mktemp("channels")
    for folder in make_phantom(root / "data", sites=2, patients=3, shape=SHAPE, seed=1):
        listing = json.loads((folder / "dataset.json").read_text())
        del listing["modality"]
        listing["channel_names"] = {"0": "FLAIR", "1": "T1"}
        for row in (row for part in ("training", "validation", "test") for row in listing[part]):
            file = folder / row["image"]
            stored = nibabel.load(file)
            other = file.with_name(f"t1_{file.name}")
            nibabel.save(nibabel.Nifti1Image(np.asarray(stored.dataobj)[::-1], stored.affine), other)
            row["image"] = [row["image"], str(other.relative_to(folder))]
        (folder / "dataset.json").write_text(json.dumps(listing))
    run = simulated(root / "data", root / "run", "fedavg", *FEW)
    return balanced(run, root / "data", "site_A")


def test_channels_come_from_several_series_on_the_grid_of_the_first(orthanc, run, two_channels, tmp_path):
    """The reference are the same voxels as NIfTI, listed by hand in the order of the run."""
    rng, study = np.random.default_rng(0), generate_uid()
    sent = {name: rng.integers(0, 1000, SHAPE) for name in ("T1", "FLAIR", "late")}
    frame, files = generate_uid(), {}
    for name, voxels in sent.items():

        def named(header, k, name=name):
            header.PatientID, header.SeriesDescription = "CHANNEL-1", f"ax {name}"
            header.FrameOfReferenceUID = frame

        files[name] = write_slices(tmp_path / "in" / name, voxels.astype(np.int16), study=study, change=named)
    orthanc.put(tmp_path / "in")
    call = ("predict", "--model", two_channels, "--dicomweb", orthanc.dicomweb, "--no-previews", "--store")
    call += ("--studies", studies(tmp_path / "studies.csv", "CHANNEL-1"))
    err = run.refused(*call, "--out", tmp_path / "none")
    assert "--channel 'FLAIR=REGEX' --channel 'T1=REGEX'" in err
    err = run.refused(*call, "--out", tmp_path / "none", "--channel", "T2=ax")
    assert "T2: the model's channels are FLAIR, T1" in err
    out = tmp_path / "out"
    run.ok(*call, "--out", out, "--channel", "T1=ax T1", "--channel", "FLAIR=ax FLAIR")
    (seg,) = objects(orthanc, "CHANNEL-1")["SEG"]
    slices = sorted(map(pydicom.dcmread, files["T1"]), key=lambda one: one.InstanceNumber)
    assert seg.ReferencedSeriesSequence[0].SeriesInstanceUID == slices[0].SeriesInstanceUID
    pixels = hd.seg.Segmentation.from_dataset(seg).get_pixels_by_source_instance(
        [one.SOPInstanceUID for one in slices], assert_missing_frames_are_empty=True
    )
    by_hand = tmp_path / "by_hand"
    by_hand.mkdir()
    del sent["late"]
    for name, voxels in sent.items():
        image = nibabel.Nifti1Image(voxels.astype(np.int16), affine_of(slices))
        nibabel.save(image, by_hand / f"{name}.nii.gz")
    rows = [{"image": ["FLAIR.nii.gz", "T1.nii.gz"]}]
    names = {"channel_names": {"0": "FLAIR", "1": "T1"}}
    (by_hand / "dataset.json").write_text(json.dumps({**names, "test": rows}))
    assert run("predict", "--model", two_channels, "--images", by_hand, "--out", tmp_path / "own")[0] == 0
    expected = np.asarray(nibabel.load(tmp_path / "own/FLAIR.nii.gz").dataobj)
    assert 0 < expected.sum() < expected.size
    np.testing.assert_array_equal(pixels[..., 0].transpose(2, 1, 0), expected)
    assert not (tmp_path / "out.state/images").exists()
    channels = ("--channel", "T1=ax T1", "--channel", "flair=ax late")
    run.ok(*call, "--out", tmp_path / "late", *channels)
    assert len(objects(orthanc, "CHANNEL-1")["SEG"]) == 2


def test_a_volume_of_a_diffusion_series_is_chosen_by_its_b_value(orthanc, run, model, two_channels, tmp_path):
    series, study, frame = generate_uid(), generate_uid(), generate_uid()
    files = {}
    for value in (0, 800):

        def diffusion(header, k, value=value):
            header.PatientID, header.Modality, header.DiffusionBValue = "DWI-1", "MR", float(value)
            header.FrameOfReferenceUID, header.SeriesDescription = frame, "diffusion"

        voxels = np.random.default_rng(value).integers(0, 1000, SHAPE).astype(np.int16)
        folder = tmp_path / f"in/{value}"
        files[value] = write_slices(folder, voxels, study=study, series=series, change=diffusion)

    def weighted(header, k):
        header.PatientID, header.SeriesDescription, header.FrameOfReferenceUID = "DWI-1", "weighted", frame

    write_slices(tmp_path / "in/T1", voxels, study=study, change=weighted)
    orthanc.put(tmp_path / "in")
    archive = ("--dicomweb", orthanc.dicomweb, "--no-previews", "--store")
    archive += ("--studies", studies(tmp_path / "studies.csv", "DWI-1"))
    call = ("predict", "--model", model, *archive, "--series", "diffusion")
    code, _, err = run(*call, "--out", tmp_path / "all")
    assert code == 1
    said = " ".join(err.split())
    assert "the series holds 2 volumes, expected one: b-value 0, b-value 800; --volume REGEX" in said
    for value in files:
        run.ok(*call, "--out", tmp_path / "one", "--volume", f"b-value {value}$")
    channels = ("--channel", "FLAIR=diffusion", "--channel", "T1=weighted", "--volume", "b-value 800")
    run.ok("predict", "--model", two_channels, *archive, "--out", tmp_path / "two", *channels)
    found = objects(orthanc, "DWI-1")["SEG"]
    referred = [
        {
            image.ReferencedSOPInstanceUID
            for image in seg.ReferencedSeriesSequence[0].ReferencedInstanceSequence
        }
        for seg in found
    ]
    sent = [
        {pydicom.dcmread(file).SOPInstanceUID for file in those} for those in (*files.values(), files[800])
    ]
    assert sorted(map(sorted, referred)) == sorted(map(sorted, sent))


@pytest.mark.slow
def test_killed_and_called_again_each_study_has_its_objects_once(orthanc, run, model, tmp_path):
    put(orthanc, tmp_path / "in", "KILLED", 12)
    call = ("predict", "--model", model, "--dicomweb", orthanc.dicomweb, "--out", tmp_path / "out", "--store")
    call += ("--studies", studies(tmp_path / "studies.csv", "KILLED"), "--report", "--no-previews")
    process = subprocess.Popen([sys.executable, "-m", "medfedaug", *map(str, call)])
    end = time.monotonic() + 120
    while time.monotonic() < end and len(objects(orthanc, "KILLED").get("SEG", ())) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = objects(orthanc, "KILLED")
    assert 3 <= len(before["SEG"]) < 12
    run.ok(*call)
    after = objects(orthanc, "KILLED")
    assert {name: len(found) for name, found in after.items()} == {"SEG": 12, "SR": 12}
    kept = {one.SOPInstanceUID for one in before["SEG"]}
    assert kept <= {one.SOPInstanceUID for one in after["SEG"]}
    assert len({one.StudyInstanceUID for one in after["SR"]}) == 12


def test_an_archive_that_sends_another_patient_gets_no_prediction(run, model, tmp_path):
    """Its objects would be another patient's diagnosis in this one's study, or a patient's under no name."""
    voxels = np.random.default_rng(0).integers(0, 1000, SHAPE).astype(np.int16)
    for patient in ("LIED", "HONEST"):
        named = lambda header, k, patient=patient: setattr(header, "PatientID", patient)  # noqa: E731
        write_slices(tmp_path / "in" / patient, voxels, change=named)
    stored = lambda handler: handler.send(b"<html>", kind="text/html")  # noqa: E731
    sent = lambda one: changed(one, PatientID="ELSE") if one.PatientID == "LIED" else one  # noqa: E731
    asked = studies(tmp_path / "studies.csv", "LIED", "HONEST")
    with hostile_archive(tmp_path / "in", sent=sent, lies=[Lie(r"/studies$", stored)]) as archive:
        given = ("--dicomweb", archive.url, "--studies", asked, "--out", tmp_path / "out", "--store")
        code, out, err = run("predict", "--model", model, *given)
    said = " ".join((out + err).split())
    assert code == 1, said
    assert "an object belongs to another patient than the archive's answer says" in said
    assert "does not say that it stored an object" in said
    assert "LIED" not in said
    (case,) = json.loads((tmp_path / "out/predictions.json").read_text())["cases"]
    assert len(archive.stored) == 1  # the honest one's SEG, which the archive did not take
    assert b"ELSE" not in archive.stored[0]
    assert not [path for path in (tmp_path / "out.state").rglob("*.dcm") if case not in str(path)]
