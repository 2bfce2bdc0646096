"""An archive as an adversary, through the real commands: each lie costs one study, and one line."""

import io
import itertools
import json
import re

import nibabel
import numpy as np
import pydicom
import pytest
from dicom_files import item, sets, write_slices
from hostile_archive import AET, OWN_AET, Lie, changed, hostile_archive
from label_objects import write_rtstruct, write_segmentation
from orthanc import free_port
from pydicom.uid import DeflatedExplicitVRLittleEndian, generate_uid
from pynetdicom import AE

from medfedaug.errors import MedFedAugWarning
from medfedaug.hospital.pacs import dicomweb, dimse, object_check
from medfedaug.hospital.pacs.archive import Access, ArchiveError
from medfedaug.hospital.pacs.open_archive import open_archive

VOXELS = np.random.default_rng(0).integers(-900, 900, (20, 16, 4)).astype(np.int16)
MASK = np.zeros(VOXELS.shape, np.uint8)
MASK[5:12, 6:14, 1:3] = 1
LIED, HONEST = "LIED-ABOUT-1", "HONEST-2"
KIND = 'multipart/related; type="application/dicom"; boundary=XX'


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Studies of two patients, each with a SEG and an RTSTRUCT; the archive lies about one."""
    root = tmp_path_factory.mktemp("source")
    for patient in (LIED, HONEST):
        named = sets(PatientID=patient)
        files = write_slices(root / patient / "image", VOXELS, study=generate_uid(), change=named)
        write_segmentation(root / patient / "seg.dcm", files, MASK)
        write_rtstruct(
            root / patient / "rtstruct.dcm", files, {"GTV": [(1, [(3, 3), (9, 3), (9, 9), (3, 9)])]}
        )
    return root


def of_lied(one, modality=None):
    return one.PatientID == LIED and modality in (None, one.Modality)


def imported(run, archive, tmp_path, *more, way="dicomweb"):
    """The exit code, the lines of failures, and all output of an import of both patients."""
    (tmp_path / "studies.csv").write_text(f"PatientID\n{LIED}\n{HONEST}\n")
    address = ("--dicomweb", archive.url) if way == "dicomweb" else ("--dimse", archive.dimse)
    if way == "move":
        address += ("--receive", archive.receive)
    options = ("--studies", tmp_path / "studies.csv", "--out", tmp_path / "out/site_A", "--timeout", 5)
    code, out, err = run("import", *address, *options, *more)
    assert "Traceback" not in out + err
    assert LIED not in out + err
    return code, " ".join(err.split()).split("failed: ")[1:], out + err


def assert_one_lost(tmp_path, result, *texts):
    """The study that was lied about cost one line; the other one is imported whole."""
    code, lines, output = result
    assert code == 1, output
    (line,) = lines
    assert all(text in line for text in texts), line
    assert not re.search(r"\d+\.\d+\.\d+\.\d+\.\d+\.\d", line)
    (image,) = (tmp_path / "out/site_A/images").iterdir()
    np.testing.assert_array_equal(np.asarray(nibabel.load(image).dataobj), VOXELS)
    listed = json.loads((tmp_path / "out/site_A.state/studies.json").read_text())["studies"]
    assert [entry["PatientID"] for entry in listed.values()] == [HONEST]


# ---------------------------------------------------------------------------- whom objects are of

OTHERS = {
    "patient": {"PatientID": "SOMEBODY-ELSE"},
    "study": {"StudyInstanceUID": "1.2.3.4"},
    "series": {"SeriesInstanceUID": "1.2.3.5"},
}


@pytest.mark.parametrize(
    ("other", "way"), [*((other, "dicomweb") for other in OTHERS), ("study", "get"), ("series", "move")]
)
def test_an_image_of_another_is_refused(run, source, tmp_path, way, other):
    sent = lambda one: changed(one, **OTHERS[other]) if of_lied(one, "CT") else one  # noqa: E731
    with hostile_archive(source, sent=sent) as archive:
        result = imported(run, archive, tmp_path, way=way)
    assert_one_lost(tmp_path, result, f"belongs to another {other} than the archive's answer says")
    assert not [*(tmp_path / "out/site_A.state/fetching").iterdir()]


def test_a_label_object_of_another_is_refused(run, source, tmp_path):
    other = {"PatientID": "SOMEBODY-ELSE", "StudyInstanceUID": "1.2.3.4"}
    sent = lambda one: changed(one, **other) if of_lied(one, "SEG") else one  # noqa: E731
    with hostile_archive(source, sent=sent) as archive:
        result = imported(run, archive, tmp_path, "--labels", "seg")
    assert_one_lost(tmp_path, result, "belongs to another patient")


def test_an_answer_without_a_patient_is_no_answer_about_one(run, source, tmp_path):
    """Else each study would count as another patient's, and a withdrawal would miss the patient."""

    def claims(row):
        row["PatientID"] = ""

    (tmp_path / "studies.csv").write_text(f"StudyInstanceUID\n{uid_of(source, LIED)}\n")
    options = ("--studies", tmp_path / "studies.csv", "--out", tmp_path / "out")
    with hostile_archive(source, claims=claims) as archive:
        code, _, err = run("import", "--dicomweb", archive.url, *options)
    assert code == 1
    assert "belongs to another patient" in " ".join(err.split())


def uid_of(source, patient):
    return str(pydicom.dcmread(next((source / patient / "image").iterdir())).StudyInstanceUID)


def test_a_folder_with_two_patients_in_one_study_is_refused(run, tmp_path):
    study, series = generate_uid(), generate_uid()

    named = sets(PatientID=lambda k: LIED if k else "SOMEBODY-ELSE")
    write_slices(tmp_path / "in", VOXELS, study=study, series=series, change=named)
    (tmp_path / "studies.csv").write_text(f"StudyInstanceUID\n{study}\n")
    code, _, err = run(
        *("import", "--folder", tmp_path / "in", "--studies", tmp_path / "studies.csv"),
        *("--out", tmp_path / "out"),
    )
    assert code == 1
    assert "belongs to another patient" in " ".join(err.split())


def test_a_label_object_that_refers_elsewhere_is_refused(run, source, tmp_path):
    def elsewhere(one):
        copy = changed(one)
        if of_lied(one, "SEG"):
            copy.ReferencedSeriesSequence[0].ReferencedInstanceSequence[0].ReferencedSOPInstanceUID = "1.2.3"
        elif of_lied(one, "RTSTRUCT"):
            (frame,) = copy.ReferencedFrameOfReferenceSequence
            (series,) = frame.RTReferencedStudySequence[0].RTReferencedSeriesSequence
            series.ContourImageSequence = [
                item(ReferencedSOPClassUID="1.2", ReferencedSOPInstanceUID="1.2.3")
            ]
        return copy

    def in_another_frame(one):
        copy = changed(one)
        if of_lied(one, "SEG"):
            copy.FrameOfReferenceUID = "1.2.3"
        elif of_lied(one, "RTSTRUCT"):
            copy.StructureSetROISequence[0].ReferencedFrameOfReferenceUID = "1.2.3"
        return copy

    def broken(one):
        return changed(one, ReferencedSeriesSequence=[]) if of_lied(one, "SEG") else one

    for number, (labels, lie, text) in enumerate(
        (
            ("seg", elsewhere, "refers to objects that its image does not have"),
            ("rtstruct", elsewhere, "refers to objects that its image does not have"),
            ("seg", in_another_frame, "in another frame of reference than its image"),
            ("rtstruct", in_another_frame, "in another frame of reference than its image"),
            ("seg", broken, "refers to its image"),
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        with hostile_archive(source, sent=lie) as archive:
            assert_one_lost(folder, imported(run, archive, folder, "--labels", labels), text)


def test_a_withdrawal_that_matches_nobody_is_an_error(run, source, tmp_path):
    sent = lambda one: changed(one, PatientID="SOMEBODY-ELSE") if of_lied(one) else one  # noqa: E731
    with hostile_archive(source, sent=sent) as archive:
        assert_one_lost(tmp_path, imported(run, archive, tmp_path), "belongs to another patient")
    out, gone = tmp_path / "out/site_A", tmp_path / "gone.csv"

    def withdrawn(*patients):
        gone.write_text("\n".join(["PatientID", *patients]) + "\n")
        code, output, err = run("import", "--withdraw", gone, "--out", out)
        assert HONEST not in output + err
        return code, " ".join((output + err).split())

    code, output = withdrawn("SOMEBODY-ELSE")
    assert code == 1
    assert "1 of 1 rows match no imported study" in output
    assert len([*(out / "images").iterdir()]) == 1
    code, output = withdrawn("SOMEBODY-ELSE", HONEST)
    assert code == 1
    assert "1 patient withdrawn" in output
    assert "1 of 2 rows match no imported study" in output
    assert not [*(out / "images").iterdir()]
    code, output = withdrawn(HONEST)  # again, as after a kill
    assert code == 0, output


# ---------------------------------------------------------------------------- redirects, tokens, pages


def test_no_redirect_is_followed(run, source, tmp_path, monkeypatch):
    monkeypatch.setenv("MEDFEDAUG_PACS_TOKEN", "THE-TOKEN")
    search, fetch = rf"/studies\?.*{LIED}", rf"/studies/{re.escape(uid_of(source, LIED))}/series/[\d.]+$"
    with hostile_archive(source) as archive, hostile_archive(source) as other:
        for number, (path, target) in enumerate(
            ((search, other.url), (fetch, f"{other.url}/studies"), (search, archive.url), (search, "//["))
        ):
            (folder := tmp_path / str(number)).mkdir()
            archive.lies = [Lie(path, lambda handler, target=target: handler.redirect(target))]
            result = imported(run, archive, folder)
            assert_one_lost(folder, result, "redirects, which is not followed")
            assert "THE-TOKEN" not in result[2]
        assert other.asked == []


def test_an_archive_that_never_answers_well_is_given_up(run, source, tmp_path):
    page = lambda handler: handler.send(b"<html>", kind="text/html")  # noqa: E731
    (tmp_path / "studies.csv").write_text("PatientID\n" + "\n".join(f"P-{n}" for n in range(9)) + "\n")
    with hostile_archive(source, lies=[Lie("", page)]) as archive:
        code, _, err = run(
            *("import", "--dicomweb", archive.url, "--studies", tmp_path / "studies.csv"),
            *("--out", tmp_path / "out"),
        )
    assert code != 0
    assert "something other than DICOMweb" in " ".join(err.split())
    assert len(archive.asked) == 3


@pytest.mark.parametrize("secret", [{"token": "THE-TOKEN"}, {"user": "me", "password": "THE-TOKEN"}])
def test_a_token_over_http_warns(secret):
    with pytest.warns(MedFedAugWarning, match="give an https URL") as warned:
        open_archive(dicomweb="http://pacs.invalid/dicom-web", access=Access(**secret))
    assert "THE-TOKEN" not in str(warned[0].message)


def test_a_token_over_https_or_to_this_machine_does_not(recwarn):
    for url in ("https://pacs.invalid/x", "http://localhost:1/x", "http://127.0.0.1:1/x", "http://[::1]:1/x"):
        open_archive(dicomweb=url, access=Access(token="THE-TOKEN"))
    open_archive(dicomweb="http://pacs.invalid/x")
    assert not recwarn


# ---------------------------------------------------------------------------- answers without end


def pages(handler):
    rows = [
        {"StudyInstanceUID": generate_uid(entropy_srcs=[str(n), handler.path]), "PatientID": LIED}
        for n in range(99)
    ]
    handler.rows(rows)


def endless(handler, kind="application/dicom+json", begin=b"["):
    def pieces():
        yield begin or b" "
        while True:
            yield b" " * 2**16

    handler.stream(pieces(), kind)


SEARCHES = {
    "pages": (pages, "answers a search without end"),
    "a body": (endless, "sends more than 1 MiB in one answer"),
    "nested": (
        lambda handler: handler.send(b"[" * 200_000 + b"]" * 200_000),
        "something other than DICOMweb",
    ),
    "other types": (lambda handler: handler.send(b'[5, [], {"zz": {"Value": [1]}}]'), "DICOMweb"),
    "no JSON": (lambda handler: handler.send(b"\xff\xfe{"), "something other than DICOMweb"),
}


@pytest.mark.parametrize("lie", SEARCHES)
def test_a_search_without_end_costs_one_study(run, source, tmp_path, monkeypatch, lie):
    monkeypatch.setattr(dicomweb, "_MOST_ANSWER", 2**20)
    monkeypatch.setattr("medfedaug.hospital.pacs.archive.MOST_FOUND", 500)
    answer, text = SEARCHES[lie]
    with hostile_archive(source, lies=[Lie(rf"/studies\?.*{LIED}", answer)]) as archive:
        assert_one_lost(tmp_path, imported(run, archive, tmp_path), text)
    assert len(archive.asked) < 50


def as_bytes(one):
    with io.BytesIO() as file:
        one.save_as(file, enforce_file_format=True)
        return file.getvalue()


def deflated(one):
    copy = changed(one, TransferSyntaxUID=DeflatedExplicitVRLittleEndian)
    copy.private_block(0x0011, "BOMB", create=True).add_new(1, "OB", bytes(2**22))
    return copy


SEQUENCE = b"\x11\0\x10\x10SQ\0\0\xff\xff\xff\xff\xfe\xff\0\xe0\xff\xff\xff\xff"
OBJECTS = {
    "65535 rows and columns": (lambda one: changed(one, Rows=65535, Columns=65535), "million voxels"),
    "2^31 frames": (lambda one: changed(one, NumberOfFrames=2**31 - 1), "million voxels"),
    "deflated": (deflated, "inflates to more than 2 MiB"),
    "nested sequences": (lambda one: as_bytes(one) + 20_000 * SEQUENCE, "cannot be decoded"),
    "bytes": (lambda one: changed(one, PixelData=bytes(2**21)), "have more than"),
}


@pytest.mark.parametrize("bomb", OBJECTS)
def test_an_object_that_is_a_bomb_costs_one_study(run, source, tmp_path, monkeypatch, bomb):
    monkeypatch.setattr("medfedaug.hospital.dicom.checks.MOST_INFLATED", 2**21)
    monkeypatch.setattr(object_check, "MOST_BYTES", 2**22)
    make, text = OBJECTS[bomb]
    sent = lambda one: make(one) if of_lied(one, "CT") else one  # noqa: E731
    with hostile_archive(source, sent=sent) as archive:
        assert_one_lost(tmp_path, imported(run, archive, tmp_path), text)


def test_a_series_that_is_sent_without_end_costs_one_study(run, source, tmp_path, monkeypatch):
    monkeypatch.setattr(dicomweb, "_MOST_OBJECT", 2**21)
    head = b"--XX\r\nContent-Type: application/dicom\r\n\r\n"
    path = re.escape(uid_of(source, LIED))

    for number, (answer, text) in enumerate(
        (
            (lambda handler: endless(handler, KIND, head), "sends an object of more than 2 MiB"),
            (
                lambda handler: endless(handler, "application/dicom", b""),
                "sends an object of more than 2 MiB",
            ),
            (lambda handler: endless(handler, "text/plain", b""), "something other than DICOM objects"),
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        with hostile_archive(source, lies=[Lie(rf"{path}/series/[\d.]+$", answer)]) as archive:
            assert_one_lost(folder, imported(run, archive, folder), text)
            assert len([one for one in archive.asked if re.search(rf"{path}.*/instances/.", one)]) == 0


# ---------------------------------------------------------------------------- DIMSE


@pytest.mark.parametrize("way", ["get", "move"])
def test_objects_that_nobody_asked_for_are_not_taken(run, source, tmp_path, way):
    with hostile_archive(source) as archive:

        def strangers():
            (one, *_) = [one for one in archive.objects if of_lied(one, "CT")]
            yield changed(one, SOPInstanceUID=generate_uid())

        archive.strangers = strangers
        code, _, output = imported(run, archive, tmp_path, way=way)
    assert code == 0, output
    for image in (tmp_path / "out/site_A/images").iterdir():
        np.testing.assert_array_equal(np.asarray(nibabel.load(image).dataobj), VOXELS)


def test_a_search_by_dimse_without_end_costs_one_study(run, source, tmp_path, monkeypatch):
    monkeypatch.setattr("medfedaug.hospital.pacs.archive.MOST_FOUND", 20)

    def without_end(rows):
        for row in rows:
            yield row
            yield from itertools.repeat(row) if row.PatientID == LIED else ()

    def long(rows):
        for row in rows:
            if row.PatientID == LIED:
                row.SeriesDescription = "x" * 2**21
            yield row

    with hostile_archive(source) as archive:
        archive.found = without_end
        assert_one_lost(tmp_path, imported(run, archive, tmp_path, way="get"), "answers a search without end")
        (folder := tmp_path / "long").mkdir()
        monkeypatch.setattr(dimse, "_MOST_ANSWER", 2**20)
        archive.found = long
        assert_one_lost(folder, imported(run, archive, folder, way="get"), "answers a search without end")


def test_the_receiver_listens_to_the_archive_alone(source):
    dataset = pydicom.dcmread(next((source / LIED / "image").iterdir()))

    def sent(calling, called):
        entity = AE(ae_title=calling)
        entity.add_requested_context(dataset.SOPClassUID)
        association = entity.associate("127.0.0.1", port, ae_title=called)
        if not association.is_established:
            return "refused"
        status = association.send_c_store(dataset)
        association.release()
        return status.Status

    port = free_port()
    with open_archive(dimse=f"{AET}@127.0.0.1:4242", access=Access(timeout=5, receive=port)):
        assert sent(AET, OWN_AET) == 0x0124  # the archive, unasked
        assert sent("ELSE", OWN_AET) == "refused"
        assert sent(AET, "ELSE") == "refused"


# ---------------------------------------------------------------------------- storing

STORED = {
    "a redirect": (lambda handler, other: handler.redirect(f"{other}/studies", 307), "redirects"),
    "nothing": (lambda handler, other: handler.send(b""), "does not say that it stored"),
    "another object": (
        lambda handler, other: handler.send(
            b'{"00081199": {"vr": "SQ", "Value": [{"00081155": {"vr": "UI", "Value": ["1.2.3"]}}]}}'
        ),
        "does not say that it stored",
    ),
    "a refusal": (
        lambda handler, other: handler.send(
            b'{"00081198": {"vr": "SQ", "Value": [{"00081197": {"vr": "US", "Value": [272]}}]}}'
        ),
        "refuses to store an object (reason 0x0110)",
    ),
}


@pytest.mark.parametrize("lie", STORED)
def test_nothing_is_stored_but_what_the_archive_says(source, lie):
    dataset = pydicom.dcmread(source / LIED / "seg.dcm")
    answer, text = STORED[lie]
    with hostile_archive(source) as archive, hostile_archive(source) as other:
        archive.lies = [Lie("", lambda handler: answer(handler, other.url))]
        with (
            open_archive(dicomweb=archive.url, access=Access(timeout=5, token="THE-TOKEN")) as opened,
            pytest.raises(ArchiveError, match=re.escape(text)) as raised,
        ):
            opened.store(dataset)
        assert other.asked == []
    assert "\x1b" not in str(raised.value)
    assert "THE-TOKEN" not in str(raised.value)
