import json
import stat

import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from dicom_files import sets, write_slices

from medfedaug.data.base import SPLITS

VOXELS = np.random.default_rng(0).integers(-900, 900, (48, 40, 5)).astype(np.int16)
ANGLE = np.deg2rad(20)
OBLIQUE = np.array([[1, 0, 0], [0, np.cos(ANGLE), -np.sin(ANGLE)], [0, np.sin(ANGLE), np.cos(ANGLE)]])
PLANTED = ("SECRET-ID", "Secret^Name", "SECRET-ACC", "Secret Street", "SECRET-DESCRIPTION")


def identity(header, k):
    header.PatientID, header.PatientName, header.AccessionNumber = PLANTED[:3]
    header.InstitutionAddress, header.SeriesDescription = PLANTED[3:]


def imported(run, source, tmp_path, *options, code=0):
    (tmp_path / "studies.csv").write_text(f"PatientID\n{PLANTED[0]}\n")
    out = tmp_path / "out/site_A"
    status, said, err = run("import", *source, "--studies", tmp_path / "studies.csv", "--out", out, *options)
    assert status == code, said + err
    return said + err, out


def same_as_sitk(out, folder):
    """Voxels and place of every corner, as SimpleITK reads the series."""
    reader = sitk.ImageSeriesReader()
    names = reader.GetGDCMSeriesFileNames(str(folder))
    expected = sitk.ReadImage(names)
    (file,) = (out / "images").glob("*.nii.gz")
    image = nibabel.load(file)
    np.testing.assert_array_equal(np.asarray(image.dataobj), sitk.GetArrayFromImage(expected).T)
    for corner in ((0, 0, 0), (47, 39, 4), (47, 0, 4)):
        lps = np.array(expected.TransformIndexToPhysicalPoint(corner))
        np.testing.assert_allclose(image.affine[:3] @ [*corner, 1], lps * [-1, -1, 1], atol=1e-3)
    return file


def test_refuses_a_geometry_that_is_no_volume(run, tmp_path):
    write_slices(tmp_path / "in", VOXELS, change=identity, shift=1.0)
    text, out = imported(run, ("--folder", tmp_path / "in"), tmp_path, code=1)
    assert "tilted gantry" in text
    assert not (out / "images").exists()


def values_of(out):
    (file,) = (out / "images").glob("*.nii.gz")
    return np.asarray(nibabel.load(file).dataobj)


def test_voxels_of_another_patient_do_not_fill_up_short_pixels(run, tmp_path):
    """The other patient is imported in the same process, first, so that memory holds its voxels."""

    def short(header, k):
        header.PatientID = "SHORT"
        header.PixelData = header.PixelData[: len(header.PixelData) // 2]

    write_slices(tmp_path / "in/a", np.abs(VOXELS) + 5000, change=identity)
    write_slices(tmp_path / "in/b", VOXELS, change=short)
    (tmp_path / "both.csv").write_text(f"PatientID\n{PLANTED[0]}\nSHORT\n")
    out = tmp_path / "out/site_A"
    options = ("--studies", tmp_path / "both.csv", "--out", out, "--parallel", 1)
    code, output, err = run("import", "--folder", tmp_path / "in", *options)
    assert code == 1
    text = " ".join((output + err).split())
    assert "its pixels are 1920 bytes, and 1 x 48 x 40 x 1 of 16 bits are 3840" in text
    assert "fetch or export it again" in text
    assert not [file.name for file in (tmp_path / "in/b").iterdir() if file.name in text]
    np.testing.assert_array_equal(values_of(out), np.abs(VOXELS) + 5000)


def read_listing(out):
    return json.loads((out / "dataset.json").read_text())


def test_ct_is_named_and_mr_is_not_since_its_sequence_is_not_known(run, tmp_path):
    for modality, names in (("CT", {"0": "CT"}), ("MR", None)):
        root = tmp_path / modality
        write_slices(root / "in", VOXELS, change=sets(PatientID=PLANTED[0], Modality=modality))
        _, out = imported(run, ("--folder", root / "in"), root)
        assert read_listing(out).get("channel_names") == names


def test_pet_in_two_units_is_said(run, tmp_path):
    for unit in ("BQML", "GML"):
        change = sets(PatientID=f"P-{unit}", Modality="PT", Units=unit)
        write_slices(tmp_path / "in" / unit, VOXELS, change=change)
    (tmp_path / "s.csv").write_text("PatientID\nP-BQML\nP-GML\n")
    source = ("--folder", tmp_path / "in", "--studies", tmp_path / "s.csv")
    code, out, err = run("import", *source, "--out", tmp_path / "out/site_A")
    assert code == 0, err
    said = " ".join((out + err).split())
    assert "images in several units (1 in BQML, 1 in GML): their intensities do not compare" in said


def test_a_volume_of_a_diffusion_series_is_chosen_by_its_b_value(run, tmp_path):
    series, study = pydicom.uid.generate_uid(), pydicom.uid.generate_uid()
    for number, value in enumerate((0, 800)):
        change = sets(PatientID=PLANTED[0], Modality="MR", DiffusionBValue=float(value))
        write_slices(tmp_path / f"in/{value}", VOXELS + number, study=study, series=series, change=change)
    source = ("--folder", tmp_path / "in")
    for name in ("all", "one"):
        (tmp_path / name).mkdir()
    output, _ = imported(run, source, tmp_path / "all", code=1)
    said = " ".join(output.split())
    assert "the series holds 2 volumes, expected one: b-value 0, b-value 800; --volume REGEX" in said
    output, out = imported(run, source, tmp_path / "one", "--volume", "b-value 800")
    np.testing.assert_array_equal(values_of(out), VOXELS + 1)


def test_from_an_archive_no_identity_leaves_the_sites_own_list(orthanc, run, tmp_path):
    files = write_slices(tmp_path / "in", VOXELS, turned=OBLIQUE, change=identity)
    orthanc.put(tmp_path / "in")
    source = ("--dicomweb", orthanc.dicomweb)
    output, out = imported(run, source, tmp_path, "--dry-run", "--json", tmp_path / "out/plan.json")
    assert not out.exists()
    more, out = imported(run, source, tmp_path)
    file = same_as_sitk(out, tmp_path / "in")
    before = file.stat().st_mtime_ns
    again, out = imported(run, source, tmp_path)
    assert file.stat().st_mtime_ns == before
    own = tmp_path / "out/site_A.state/studies.json"
    assert PLANTED[0] in own.read_text()
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
    planted = (*PLANTED, pydicom.dcmread(files[0]).StudyInstanceUID)
    texts = [output, more, again]
    for path in (tmp_path / "out").rglob("*"):
        texts.append(str(path))
        if path.is_file() and path != own:
            content = nibabel.load(path).header.binaryblock if path.suffix == ".gz" else path.read_bytes()
            texts.append(content.decode("latin-1"))
    assert not [value for value in planted for text in texts if value in text]


@pytest.mark.parametrize(("patients", "possible"), [(17, True), (6, False)])
def test_a_withdrawal_says_whether_the_next_job_is_possible(run, tmp_path, patients, possible):
    names = [f"P{n}" for n in range(patients)]
    for name in names:
        write_slices(tmp_path / "in" / name, VOXELS[:8, :8, :2], change=sets(PatientID=name))
    (tmp_path / "s.csv").write_text("PatientID\n" + "\n".join(names) + "\n")
    out = tmp_path / "out/site_A"
    source = ("--folder", tmp_path / "in", "--studies", tmp_path / "s.csv")
    assert run("import", *source, "--out", out)[0] == 0
    leaves = json.loads((out / "dataset.json").read_text())["training"][0]["patient"]
    listed = json.loads((tmp_path / "out/site_A.state/studies.json").read_text())["studies"].values()
    (identity,) = [entry["PatientID"] for entry in listed if entry["patient"] == leaves]
    (tmp_path / "gone.csv").write_text(f"PatientID\n{identity}\n")
    code, said, err = run("import", "--withdraw", tmp_path / "gone.csv", "--out", out)
    assert code == 0, err
    said = " ".join((said + err).split())
    assert ("the next job is possible with the default rules" in said) is possible
    assert ("the site is left out of the next job" in said) is not possible
    assert "models that were trained keep what they learned" in said


def test_patients_keep_their_split_when_others_are_added(run, tmp_path):
    out, before = tmp_path / "out/site_A", {}
    for count in (5, 9):
        for n in range(count):
            folder = tmp_path / f"in/{n}"
            if not folder.exists():
                write_slices(folder, VOXELS[:8, :8, :2], change=sets(PatientID=f"P{n}"))
        listed = "\n".join(f"P{n}" for n in range(count))
        (tmp_path / "studies.csv").write_text(f"PatientID\n{listed}\n")
        source = ("--folder", tmp_path / "in", "--studies", tmp_path / "studies.csv")
        run.ok("import", *source, "--out", out)
        content = json.loads((out / "dataset.json").read_text())
        now = {row["patient"]: part for part in SPLITS for row in content[part]}
        assert len(now) == count
        assert set(now.values()) == {*SPLITS}
        assert before.items() <= now.items()
        before = now
