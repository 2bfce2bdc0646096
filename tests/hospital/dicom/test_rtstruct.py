"""RTSTRUCT and report of a label map, read by pydicom, dsrdump and dciodvfy."""

import shutil
import subprocess
from dataclasses import replace

import contourpy
import numpy as np
import pydicom
import pytest
import shapely
from dicom_files import affine_of, write_frames, write_slices
from matplotlib.path import Path as Outline

from medfedaug.errors import DataError
from medfedaug.hospital.dicom.identity import ModelIdentity
from medfedaug.hospital.dicom.prediction_objects import write_report
from medfedaug.hospital.dicom.rtstruct import closed_contours, write_rtstruct
from medfedaug.hospital.dicom.segmentation import Segments, write_segmentation

SHAPE = (48, 40, 5)
ANGLE = np.deg2rad(20)
OBLIQUE = np.array([[1, 0, 0], [0, np.cos(ANGLE), -np.sin(ANGLE)], [0, np.sin(ANGLE), np.cos(ANGLE)]])
SEGMENTS = Segments(("background", "lesion", "core", "cyst"), ModelIdentity("ab" * 32, "site_A"))


@pytest.fixture(scope="module")
def label():
    """A lesion with a hole of which a part is core, a second piece on the border, and no cyst."""
    mask = np.zeros(SHAPE, np.uint8)
    mask[5:30, 8:30, 1:4] = 1
    mask[10:20, 12:20, 2] = 0
    mask[14:17, 14:16, 2] = 2
    mask[:3, :3, 0] = 1
    return mask


def faults(file) -> list[str]:
    """The errors that dciodvfy finds; none where it is not installed."""
    program = shutil.which("dciodvfy")
    if program is None:
        return []
    done = subprocess.run([program, file], capture_output=True, text=True, timeout=60, check=False)
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Error")]


def drawn(structure, number, slices):
    """Voxels of a region by its contours in millimetres, and the headers' own geometry."""
    inverse = np.linalg.inv(np.diag([-1.0, -1, 1, 1]) @ affine_of(slices))
    centres = np.stack(np.meshgrid(*map(np.arange, SHAPE[:2]), indexing="ij"), -1).reshape(-1, 2)
    mask = np.zeros(SHAPE, bool)
    (region,) = [one for one in structure.ROIContourSequence if one.ReferencedROINumber == number]
    for contour in region.get("ContourSequence", []):
        points = np.reshape(np.array(contour.ContourData, float), (-1, 3))
        assert contour.NumberOfContourPoints == len(points)
        voxel = points @ inverse[:3, :3].T + inverse[:3, 3]
        k = round(voxel[0, 2])
        np.testing.assert_allclose(voxel[:, 2], k, atol=1e-3)
        (image,) = contour.ContourImageSequence
        assert image.ReferencedSOPInstanceUID == slices[k].SOPInstanceUID
        inside = Outline([*voxel[:, :2], voxel[0, :2]], closed=True).contains_points(centres)
        mask[..., k] |= inside.reshape(SHAPE[:2])
    return mask


def test_contours_of_an_oblique_series_are_the_label_map(label, tmp_path):
    files = write_slices(tmp_path / "series", np.zeros(SHAPE, np.int16), turned=OBLIQUE)
    write_rtstruct(tmp_path / "rt.dcm", tmp_path / "series", label, SEGMENTS)
    assert faults(tmp_path / "rt.dcm") == []
    written = pydicom.dcmread(tmp_path / "rt.dcm")
    slices = sorted(map(pydicom.dcmread, files), key=lambda one: one.InstanceNumber)
    for number in (1, 2, 3):
        np.testing.assert_array_equal(drawn(written, number, slices), label == number)
    assert (written.PatientID, written.StudyInstanceUID) == ("PID-4711", slices[0].StudyInstanceUID)
    assert written.ApprovalStatus == "UNAPPROVED"
    (frame,) = written.ReferencedFrameOfReferenceSequence
    (series,) = frame.RTReferencedStudySequence[0].RTReferencedSeriesSequence
    assert series.SeriesInstanceUID == slices[0].SeriesInstanceUID
    named = [one.ReferencedSOPInstanceUID for one in series.ContourImageSequence]
    assert named == [one.SOPInstanceUID for one in slices]
    roi = written.StructureSetROISequence[0]
    assert (roi.ROIName, roi.ROIGenerationAlgorithm) == ("lesion", "AUTOMATIC")
    assert "ab" * 32 in roi.ROIDerivationAlgorithmIdentificationSequence[0].AlgorithmParameters
    observed = written.RTROIObservationsSequence[0].RTROIIdentificationCodeSequence[0]
    assert (observed.CodeValue, observed.CodeMeaning) == ("CLASS1", "lesion")


def test_contours_of_one_file_with_frames_in_odd_order_name_their_frames(label, tmp_path):
    order = [(0, k) for k in (3, 0, 4, 1, 2)]
    file = write_frames(tmp_path / "series/all.dcm", [np.zeros(SHAPE, np.int16)], order)
    write_rtstruct(tmp_path / "rt.dcm", file.parent, label, SEGMENTS)
    assert faults(tmp_path / "rt.dcm") == []
    written, source = pydicom.dcmread(tmp_path / "rt.dcm"), pydicom.dcmread(file)
    groups = source.PerFrameFunctionalGroupsSequence
    for contour in written.ROIContourSequence[0].ContourSequence:
        frame = contour.ContourImageSequence[0].ReferencedFrameNumber
        place = groups[frame - 1].PlanePositionSequence[0].ImagePositionPatient
        assert float(contour.ContourData[2]) == pytest.approx(float(place[2]), abs=1e-3)


def test_a_report_names_volume_segment_and_model(label, tmp_path):
    write_slices(tmp_path / "series", np.zeros(SHAPE, np.int16), turned=OBLIQUE)
    write_segmentation(tmp_path / "seg.dcm", tmp_path / "series", label, SEGMENTS)
    write_report(tmp_path / "sr.dcm", tmp_path / "series", label, tmp_path / "seg.dcm", SEGMENTS)
    assert faults(tmp_path / "sr.dcm") == faults(tmp_path / "seg.dcm") == []
    written, seg = pydicom.dcmread(tmp_path / "sr.dcm"), pydicom.dcmread(tmp_path / "seg.dcm")
    assert written.VerificationFlag == "UNVERIFIED"
    measured = next(
        one
        for one in written.ContentSequence
        if one.ConceptNameCodeSequence[0].CodeMeaning == "Imaging Measurements"
    )
    assert len(measured.ContentSequence) == 3
    for number, group in enumerate(measured.ContentSequence, start=1):
        items = {one.ConceptNameCodeSequence[0].CodeMeaning: one for one in group.ContentSequence}
        value = items["Volume"].MeasuredValueSequence[0]
        millilitres = (label == number).sum() * 0.9 * 1.1 * 3.0 / 1000
        assert float(value.NumericValue) == pytest.approx(millilitres, abs=1e-3)
        assert value.MeasurementUnitsCodeSequence[0].CodeValue == "mL"
        reference = items["Referenced Segment"].ReferencedSOPSequence[0]
        assert reference.ReferencedSOPInstanceUID == seg.SOPInstanceUID
        assert reference.ReferencedSegmentNumber == number
        tracked = items["Tracking Unique Identifier"].UID
        assert tracked == seg.SegmentSequence[number - 1].TrackingUID
    program = shutil.which("dsrdump")
    if program is not None:
        done = subprocess.run([program, tmp_path / "sr.dcm"], capture_output=True, text=True, check=True)
        for text in ('(CLASS1,99MEDFEDAUG,"lesion")', '"site: site_A"', '(mL,UCUM,"milliliter")'):
            assert text in done.stdout


def all_objects(folder, label, segments=SEGMENTS):
    """SEG, RTSTRUCT and report of the series in a folder."""
    write_segmentation(folder / "seg.dcm", folder / "series", label, segments)
    write_rtstruct(folder / "rt.dcm", folder / "series", label, segments)
    write_report(folder / "sr.dcm", folder / "series", label, folder / "seg.dcm", segments)
    return [pydicom.dcmread(folder / name) for name in ("seg.dcm", "rt.dcm", "sr.dcm")]


def test_a_class_that_the_images_character_set_lacks_makes_the_object_utf8(label, tmp_path):
    def named(header, k):
        header.SpecificCharacterSet, header.PatientName = "ISO_IR 100", "Müller^Jürgen"

    write_slices(tmp_path / "series", np.zeros(SHAPE, np.int16), change=named)
    for written in all_objects(tmp_path, label):
        assert (written.SpecificCharacterSet, str(written.PatientName)) == ("ISO_IR 100", "Müller^Jürgen")
    russian = replace(SEGMENTS, classes=("background", "опухоль", "core", "cyst"))
    seg, contours, report = all_objects(tmp_path, label, russian)
    for written in (seg, contours, report):
        assert (written.SpecificCharacterSet, str(written.PatientName)) == ("ISO_IR 192", "Müller^Jürgen")
    assert seg.SegmentSequence[0].SegmentLabel == "опухоль"
    assert contours.StructureSetROISequence[0].ROIName == "опухоль"
    assert "опухоль" in str(report)


def test_undeclared_letters_keep_their_bytes_and_are_not_turned_into_others(label, tmp_path):
    def named(header, k):
        header.PatientName = "Müller^Jürgen"  # without a character set: pydicom writes Latin-1

    write_slices(tmp_path / "series", np.zeros(SHAPE, np.int16), change=named)
    for written in all_objects(tmp_path, label):
        assert "SpecificCharacterSet" not in written
        assert written.PatientName.original_string == "Müller^Jürgen".encode("latin-1")
    with pytest.raises(DataError, match="would change"):
        all_objects(tmp_path, label, replace(SEGMENTS, classes=("background", "опухоль", "core", "cyst")))


def test_a_name_that_its_character_set_cannot_decode_is_refused_for_every_object(label, tmp_path):
    files = write_slices(
        tmp_path / "series",
        np.zeros(SHAPE, np.int16),
        change=lambda header, k: setattr(header, "PatientName", "Müller^Jürgen"),
    )
    all_objects(tmp_path, label)  # the SEG for the report
    for file in files:
        header = pydicom.dcmread(file)
        name = header.PatientName.original_string
        header.SpecificCharacterSet, header.PatientName = "ISO_IR 192", "?" * len(name)
        header.save_as(file)
        file.write_bytes(file.read_bytes().replace(b"?" * len(name), name))
    with pytest.raises(DataError, match=r"no DICOM SEG can be written for it: .* cannot decode"):
        write_segmentation(tmp_path / "seg2.dcm", tmp_path / "series", label, SEGMENTS)
    with pytest.raises(DataError, match=r"no RTSTRUCT can be written for it: .* cannot decode"):
        write_rtstruct(tmp_path / "rt2.dcm", tmp_path / "series", label, SEGMENTS)
    assert not [*tmp_path.glob("*2.dcm")]


def test_uids_follow_from_model_site_series_and_kind(label, tmp_path):
    write_slices(tmp_path / "series", np.zeros(SHAPE, np.int16), series="1.2.3")
    for name, segments in (
        ("first", SEGMENTS),
        ("same", SEGMENTS),
        ("site", replace(SEGMENTS, model=ModelIdentity("ab" * 32, "site_B"))),
        ("model", replace(SEGMENTS, model=ModelIdentity("ac" * 32, "site_A"))),
        ("settings", replace(SEGMENTS, model=ModelIdentity("ab" * 32, "site_A", settings="1"))),
    ):
        write_segmentation(tmp_path / f"{name}.dcm", tmp_path / "series", label, segments)
        write_rtstruct(tmp_path / f"{name}.rt.dcm", tmp_path / "series", label, segments)
    uids = {file.name: pydicom.dcmread(file) for file in tmp_path.glob("*.dcm")}
    for level in ("SeriesInstanceUID", "SOPInstanceUID"):
        written = {name: one[level].value for name, one in uids.items()}
        assert written["first.dcm"] == written["same.dcm"]
        assert written["first.rt.dcm"] == written["same.rt.dcm"]
        assert len({*written.values()}) == 8


# ------------------------------------------------------------ contours of a mask


def in_rings(rings, shape):
    """Voxels whose centres are in a ring, by matplotlib."""
    centres = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, 2)
    inside = [Outline([*ring, ring[0]], closed=True).contains_points(centres) for ring in rings]
    return np.array(inside).any(axis=0).reshape(shape) if inside else np.zeros(shape, bool)


def with_holes(mask):
    """Outer rings and holes of a mask, apart."""
    lines = contourpy.contour_generator(z=np.pad(mask.astype(float), 1).T).lines(0.5)
    return [line - 1 for line in lines]


def signed_area(ring):
    x, y = np.asarray(ring, float).T
    return 0.5 * (x * np.roll(y, -1) - np.roll(x, -1) * y).sum()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_random_masks_are_found_again(share):
    rng = np.random.default_rng(0)
    for _ in range(20):
        mask = rng.random((17, 23)) < share
        rings = closed_contours(mask)
        np.testing.assert_array_equal(in_rings(rings, mask.shape), mask)
        # Rings turn to the left, and their holes to the right; a channel has no width.
        assert sum(map(signed_area, rings)) == pytest.approx(sum(map(signed_area, with_holes(mask))))


def test_holes_in_a_row_and_an_island_in_a_hole():
    mask = np.zeros((30, 30), bool)
    mask[2:28, 2:28] = True
    mask[4:8, 10:14] = mask[10:14, 11:13] = mask[12:26, 18:26] = mask[18:20, 11:12] = False
    mask[16:20, 20:24] = True
    mask[17, 22] = False
    rings = closed_contours(mask)
    assert len(rings) == 2
    np.testing.assert_array_equal(in_rings(rings, mask.shape), mask)
    for ring in rings:
        # Cut along its channels it is one piece of the right size: nothing crosses.
        assert shapely.make_valid(shapely.Polygon(ring)).area == pytest.approx(shapely.Polygon(ring).area)


def test_nothing_has_no_contour_and_everything_reaches_the_border():
    assert closed_contours(np.zeros((4, 5), bool)) == []
    (ring,) = closed_contours(np.ones((4, 5), bool))
    assert (ring.min(), *ring.max(axis=0)) == (-0.5, 3.5, 4.5)
