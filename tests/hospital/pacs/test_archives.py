import numpy as np
import pydicom
import pytest
from dicom_files import sets, write_object, write_slices
from orthanc import free_port, running_orthanc
from pydicom.uid import (
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    RLELossless,
    SegmentationStorage,
    generate_uid,
)

from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import (
    Access,
    ArchiveError,
    ArchiveSeries,
    ArchiveStudy,
    FetchError,
    StudyQuery,
)
from medfedaug.hospital.pacs.open_archive import open_archive

VOXELS = np.random.default_rng(0).integers(-900, 900, (48, 40, 5)).astype(np.int16)
SYNTAXES = {"explicit": ExplicitVRLittleEndian, "implicit": ImplicitVRLittleEndian}
SYNTAXES |= {"jpeg2000": JPEG2000Lossless, "rle": RLELossless}


def named(patient, accession):
    return sets(PatientID=patient, AccessionNumber=accession, SeriesDescription="T1 ax")


@pytest.fixture(scope="module")
def stored(orthanc, tmp_path_factory):
    """One patient with a study of four series in four syntaxes, and a study with a SEG; by name the files."""
    root = tmp_path_factory.mktemp("sent")
    first, second = generate_uid(), generate_uid()
    files = {}
    for name, syntax in SYNTAXES.items():
        files[name] = write_slices(
            root / name, VOXELS, study=first, syntax=syntax, change=named("ARCH-1", "A-1")
        )
    files["seg"] = [write_object(root / "seg.dcm", study=second, PatientID="ARCH-1", AccessionNumber="A-2")]
    files["other"] = write_slices(root / "other", VOXELS, change=named("ARCH-10", "A-10"))
    orthanc.put(root)
    return first, second, files


@pytest.fixture(params=["dicomweb", "get", "move", "folder"])
def archive(request, orthanc, stored):
    access = Access(timeout=20, receive=orthanc.receive if request.param == "move" else None)
    address = {
        "dicomweb": {"dicomweb": orthanc.dicomweb},
        "folder": {"folder": stored[2]["explicit"][0].parents[1]},
    }.get(request.param, {"dimse": orthanc.dimse})
    with open_archive(**address, access=access) as opened:
        yield opened


def test_finds_by_each_key_and_nothing_but_what_was_asked_for(archive, stored):
    first, second, _ = stored
    for key, value, expected in (
        ("PatientID", "ARCH-1", {first, second}),
        ("AccessionNumber", "A-1", {first}),
        ("StudyInstanceUID", second, {second}),
        ("PatientID", "ARCH-", set()),
    ):
        assert {study.uid for study in archive.find_studies(StudyQuery(key, value))} == expected
    (study,) = archive.find_studies(StudyQuery("AccessionNumber", "A-1"))
    assert (study.patient, study.accession) == ("ARCH-1", "A-1")
    series = archive.find_series(study)
    assert len(series) == 4
    assert {(one.modality, one.number, one.description, one.instances) for one in series} == {
        ("CT", "3", "T1 ax", 5)
    }


def test_fetches_the_bits_in_the_syntax_in_which_they_are_stored(archive, stored, tmp_path):
    _, _, files = stored
    (study,) = archive.find_studies(StudyQuery("AccessionNumber", "A-1"))
    by_uid = {one.uid: one for one in archive.find_series(study)}
    for name, sent in files.items():
        if name not in SYNTAXES:
            continue
        originals = {(one := pydicom.dcmread(file)).SOPInstanceUID: one for file in sent}
        came = archive.fetch(by_uid[next(iter(originals.values())).SeriesInstanceUID], tmp_path / name)
        assert len(came) == 5
        for file in came:
            fetched = pydicom.dcmread(file)
            original = originals.pop(fetched.SOPInstanceUID)
            assert fetched.file_meta.TransferSyntaxUID == SYNTAXES[name]
            assert fetched.PixelData == original.PixelData
            assert (fetched.PatientID, fetched.ImagePositionPatient) == (
                original.PatientID,
                original.ImagePositionPatient,
            )
            assert fetched.SOPInstanceUID not in file.name


def test_a_second_fetch_asks_for_what_is_missing_alone(archive, stored, tmp_path):
    (study,) = archive.find_studies(StudyQuery("AccessionNumber", "A-10"))
    (series,) = archive.find_series(study)
    counted = []
    files = archive.fetch(series, tmp_path, lambda: counted.append(1))
    assert len(counted) == 5
    before = {file: file.lstat().st_mtime_ns for file in files}
    files[2].unlink()
    assert archive.fetch(series, tmp_path) == files
    if not files[0].is_symlink():
        assert [file for file in files if file.lstat().st_mtime_ns != before[file]] == [files[2]]
    assert not list(tmp_path.glob("*.part"))


def test_a_series_that_is_not_there_costs_itself_alone(archive, stored, tmp_path):
    with pytest.raises(FetchError) as raised:
        archive.fetch(ArchiveSeries(stored[0], "1.2.3.4.5"), tmp_path)
    assert "no " in str(raised.value)
    assert "1.2.3" not in str(raised.value)
    assert archive.find_studies(StudyQuery("StudyInstanceUID", "1.2.3.4")) == []
    assert archive.find_series(ArchiveStudy("1.2.3.4")) == []


def test_stores_what_it_is_given(archive, orthanc, stored, tmp_path):
    study = generate_uid()
    (written,) = write_slices(tmp_path / "new", VOXELS[..., :1], study=study, change=named("ARCH-new", ""))
    seg = write_object(tmp_path / "seg.dcm", SegmentationStorage, study=study, PatientID="ARCH-new")
    objects = [pydicom.dcmread(written), pydicom.dcmread(seg)]
    if archive.place == str(stored[2]["explicit"][0].parents[1]):
        with pytest.raises(ArchiveError, match="stores nothing"):
            archive.store(objects[0])
        return
    for one in objects:
        archive.store(one)
    with open_archive(dicomweb=orthanc.dicomweb) as other:
        (copy,) = other.find_studies(StudyQuery("StudyInstanceUID", study))
        series = other.find_series(copy)
        assert {one.uid for one in series} == {one.SeriesInstanceUID for one in objects}
        (file,) = other.fetch(
            next(one for one in series if one.modality == "CT" and one.instances == 1), tmp_path / "back"
        )
    assert pydicom.dcmread(file).PatientID == "ARCH-new"


def test_refuses_values_that_an_archive_takes_for_many():
    for value in ("*", "A?", "a\\b", ""):
        with pytest.raises(ConfigError):
            StudyQuery("PatientID", value)
    with pytest.raises(ConfigError, match="is not a UID"):
        StudyQuery("StudyInstanceUID", "../1")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ({}, "no archive"),
        ({"dicomweb": "http://x", "folder": "/"}, "--dicomweb and --folder"),
        ({"dicomweb": "pacs.example.org"}, "takes a URL"),
        ({"dicomweb": "http://me:secret@pacs/x"}, "--user"),
        ({"dimse": "pacs:104"}, "AET@HOST:PORT"),
        ({"dimse": "PACS@host:99999"}, "AET@HOST:PORT"),
        ({"folder": "/there/is/no/such"}, "no such folder"),
    ],
)
def test_refuses_an_address_in_one_line(address, message):
    with pytest.raises(ConfigError, match=message) as raised:
        open_archive(**address)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("kind", ["dicomweb", "dimse"])
def test_says_in_one_line_that_nobody_answers(kind):
    port = free_port()
    address = f"http://127.0.0.1:{port}/dicom-web" if kind == "dicomweb" else f"PACS@127.0.0.1:{port}"
    archive = open_archive(**{kind: address}, access=Access(timeout=2))
    with archive, pytest.raises(ArchiveError, match="cannot be reached") as raised:
        archive.find_studies(StudyQuery("PatientID", "Meyer"))
    assert "Meyer" not in str(raised.value)


def test_another_title_than_the_archives_is_refused(orthanc):
    archive = open_archive(dimse=f"WRONG@127.0.0.1:{orthanc.dicom}")
    with archive, pytest.raises(ArchiveError, match=r"refuses the AE title|cannot be reached"):
        archive.find_studies(StudyQuery("PatientID", "x"))


def test_password_is_sent_and_never_shown(tmp_path):
    users = {"AuthenticationEnabled": True, "RegisteredUsers": {"me": "a-secret"}}
    with running_orthanc(tmp_path / "locked", **users) as locked:
        for access, status in ((Access(), "401"), (Access(user="me", password="wrong-secret"), "401")):
            with open_archive(dicomweb=locked.dicomweb, access=access) as archive:
                with pytest.raises(ArchiveError, match=status) as raised:
                    archive.find_studies(StudyQuery("PatientID", "x"))
                assert "secret" not in str(raised.value) + repr(access)
        with open_archive(dicomweb=locked.dicomweb, access=Access(user="me", password="a-secret")) as archive:
            assert archive.find_studies(StudyQuery("PatientID", "x")) == []
