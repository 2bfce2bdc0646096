"""Which outlines become ground truth: predictions, two readers, segments without a class."""

import json

import numpy as np
import pydicom
import pytest
from imports import Site, box, write_image, write_outline
from label_objects import write_rtstruct

from medfedaug.hospital.dicom.identity import ModelIdentity, ObjectKind
from medfedaug.hospital.dicom.rtstruct import write_rtstruct as write_predicted_contours
from medfedaug.hospital.dicom.segmentation import Segments
from medfedaug.hospital.dicom.segmentation import write_segmentation as write_prediction

BY_HAND = box((3, 9), (4, 9), (1, 3))
OTHER = box((12, 18), (4, 9), (1, 3))
SEG = ("--labels", "seg", "--segments", "tumour*=tumour")
MODEL = Segments(("background", "tumour core"), ModelIdentity("ab" * 32))


@pytest.fixture
def site(run, tmp_path):
    return Site(run, tmp_path, ("--folder", tmp_path / "in"))


def unnamed(path):
    """Take equipment and series of this software out of an object, as another program's copy lacks them."""
    dataset = pydicom.dcmread(path)
    dataset.Manufacturer = dataset.ManufacturerModelName = "viewer"
    dataset.SeriesDescription = "copy"
    dataset.save_as(path)


@pytest.mark.parametrize(
    ("labels", "mark"),
    [*(("seg", mark) for mark in ("whole", "equipment", "series", "type")), ("rtstruct", "series")],
)
def test_an_own_prediction_is_no_ground_truth(site, tmp_path, labels, mark):
    files = write_image(tmp_path / "in/a", "P")
    predicted = tmp_path / "in/predicted.dcm"
    write = write_prediction if labels == "seg" else write_predicted_contours
    write(predicted, tmp_path / "in/a", OTHER, MODEL)
    dataset = pydicom.dcmread(predicted)
    if mark == "type":  # another program's copy keeps the type alone
        unnamed(predicted)
    elif mark == "equipment":  # an early version, or an archive that names series anew
        dataset.SeriesDescription, dataset.SeriesNumber = "AI result", 7
    elif mark == "series":  # and says nothing of its algorithm
        dataset.Manufacturer = dataset.ManufacturerModelName = "archive"
    if mark in ("equipment", "series"):
        for one in dataset.get("SegmentSequence") or dataset.StructureSetROISequence:
            name = "SegmentAlgorithmType" if labels == "seg" else "ROIGenerationAlgorithm"
            setattr(one, name, "MANUAL")
        dataset.save_as(predicted)
    options = ("--labels", labels, "--segments", "tumour*=tumour")
    output = site.load(["P"], *options, code=1)
    assert "--automatic-labels takes" in output or "series that were left out" in output
    assert not (site.out / "dataset.json").exists()
    if labels == "seg":
        write_outline(tmp_path / "in/hand.dcm", files, {"Tumour core": BY_HAND}, "20200101")
    else:
        square = [(2.5, 3.5), (8.5, 3.5), (8.5, 8.5), (2.5, 8.5)]
        write_rtstruct(tmp_path / "in/hand.dcm", files, {"Tumour": [(1, square), (2, square)]})
    site.load(["P"], *options)
    np.testing.assert_array_equal(site.label("P"), BY_HAND)
    both = Site(site.run, tmp_path / "both", site.source)
    output = both.load(["P"], *options, "--automatic-labels", code=1)
    assert "2 outlines, in 2 series, of tumour; choose with --label-series" in output


def test_a_series_of_ours_is_told_before_anything_is_fetched(site, tmp_path):
    write_image(tmp_path / "in/a", "P")
    write_prediction(tmp_path / "in/predicted.dcm", tmp_path / "in/a", OTHER, MODEL)
    site.load(["P"], *SEG, "--dry-run", "--json", tmp_path / "plan.json")
    (plan,) = json.loads((tmp_path / "plan.json").read_text())
    decision = "left out: a prediction of medfedaug; --automatic-labels takes it"
    assert [one["decision"] for one in plan["series"]] == ["image", decision]
    assert plan["problem"] == "it has no SEG but 1 series that were left out"
    site.load(["P"], *SEG, "--automatic-labels")
    np.testing.assert_array_equal(site.label("P"), OTHER)


@pytest.mark.parametrize("kind", [ObjectKind.SEGMENTATION, ObjectKind.RTSTRUCT])
def test_a_corrected_prediction_of_another_program_counts(site, tmp_path, kind):
    """It keeps segments and algorithm of the prediction, under its own equipment, and says SEMIAUTOMATIC."""
    write_image(tmp_path / "in/a", "P")
    seg = kind is ObjectKind.SEGMENTATION
    write = write_prediction if seg else write_predicted_contours
    write(tmp_path / "in/p.dcm", tmp_path / "in/a", OTHER, MODEL)
    unnamed(tmp_path / "in/p.dcm")
    dataset = pydicom.dcmread(tmp_path / "in/p.dcm")
    if seg:
        dataset.SegmentSequence[0].SegmentAlgorithmType = "SEMIAUTOMATIC"
    else:
        dataset.StructureSetROISequence[0].ROIGenerationAlgorithm = "SEMIAUTOMATIC"
    dataset.save_as(tmp_path / "in/p.dcm")
    site.load(["P"], "--labels", kind.word, "--segments", "tumour*=tumour")
    np.testing.assert_array_equal(site.label("P"), OTHER)


def test_automatic_segments_of_an_object_are_left_out_one_by_one(site, tmp_path):
    files = write_image(tmp_path / "in/a", "P")
    masks = {"Tumour": BY_HAND, "Tumour AI": OTHER}
    types = {"Tumour": "MANUAL", "Tumour AI": "AUTOMATIC"}
    write_outline(tmp_path / "in/s.dcm", files, masks, "20200101", algorithm=types)
    site.load(["P"], *SEG)
    np.testing.assert_array_equal(site.label("P"), BY_HAND)
    # A class that only the program outlined would be background without a word.
    several = Site(site.run, tmp_path / "several", site.source)
    options = ("--labels", "seg", "--segments", "tumour=tumour", "--segments")
    output = several.load(["P"], *options, "tumour ai=organ", code=1)
    assert (
        "1 segment (number 2) would become background: without a class in --segments, or automatic" in output
    )
    several = Site(site.run, tmp_path / "named", site.source)
    several.load(["P"], *options, "tumour ai=background")
    np.testing.assert_array_equal(several.label("P"), BY_HAND)


def test_two_readers_are_refused_or_chosen(site, tmp_path):
    files = write_image(tmp_path / "in/a", "P")
    first = write_outline(tmp_path / "in/1.dcm", files, {"Tumour": BY_HAND}, "20200101", "reader 1")
    write_outline(tmp_path / "in/2.dcm", files, {"Tumour SECRET": OTHER}, "20200302", "reader 2")
    output = site.load(["P"], *SEG, code=1)
    assert "has 2 outlines, in 2 series, of tumour; choose with --label-series UID, REGEX or newest" in output
    assert "SECRET" not in output
    refused = json.loads((site.state / "studies.json").read_text())["refused"]
    assert [sorted(one["segments"]) for one in refused.values()] == [["Tumour", "Tumour SECRET"]]
    # The choice may come after the refusal, in the same folder.
    site.load(["P"], *SEG, "--label-series", "newest")
    np.testing.assert_array_equal(site.label("P"), OTHER)
    assert json.loads((site.state / "studies.json").read_text())["refused"] == {}
    uid = str(pydicom.dcmread(first).SeriesInstanceUID)
    for name, rules, expected in (
        ("uid", [uid], BY_HAND),
        ("regex", ["reader 1"], BY_HAND),
        ("both", ["reader .*", "newest"], OTHER),
    ):
        other = Site(site.run, tmp_path / name, site.source)
        options = [part for rule in rules for part in ("--label-series", rule)]
        other.load(["P"], *SEG, *options, "--json", other.root / "plan.json")
        np.testing.assert_array_equal(other.label("P"), expected)
        left_out = (other.root / "plan.json").read_text().count("not what --label-series names")
        assert left_out == (0 if name == "both" else 1)


def test_a_refused_patient_can_be_withdrawn(site, tmp_path):
    """The names of segments, which somebody typed, are kept in the site's own list."""
    files = write_image(tmp_path / "in/a", "P")
    write_outline(tmp_path / "in/1.dcm", files, {"Doe^Jane": BY_HAND}, "20200101")
    site.load(["P"], *SEG, code=1)
    assert "Doe^Jane" in (site.state / "studies.json").read_text()
    (tmp_path / "gone.csv").write_text("PatientID\nP\n")
    code, output, err = site.run("import", "--withdraw", tmp_path / "gone.csv", "--out", site.out)
    assert code == 0, output + err
    assert "Doe^Jane" not in (site.state / "studies.json").read_text()
    assert "the patient was withdrawn" in site.load(["P"], *SEG, code=1)


def test_outlines_of_different_classes_belong_together(site, tmp_path):
    """A newer outline replaces one with a class in common, as a whole, and no other one."""
    files = write_image(tmp_path / "in/a", "P")
    organ, edema = box((20, 23), (2, 5), (1, 3)), box((3, 9), (10, 12), (1, 3))
    write_outline(tmp_path / "in/1.dcm", files, {"Tumour": BY_HAND, "Edema": edema}, "20200101")
    write_outline(tmp_path / "in/2.dcm", files, {"Organ": organ}, "20200102")
    write_outline(tmp_path / "in/3.dcm", files, {"Tumour": OTHER}, "20200103")
    options = ("--labels", "seg", "--label-series", "newest", "--classes", "background,organ,edema,tumour")
    for name in ("tumour", "edema", "organ"):
        options += ("--segments", f"{name}={name}")
    output = site.load(["P"], *options)
    assert "classes: 0 background, 1 organ, 2 edema, 3 tumour" in output
    np.testing.assert_array_equal(site.label("P"), organ + 3 * OTHER)
    content = json.loads((site.out / "dataset.json").read_text())
    assert [*content["labels"].values()] == ["background", "organ", "edema", "tumour"]


def test_the_federation_numbers_classes_and_the_segments_decide_over_overlaps(run, tmp_path):
    files = write_image(tmp_path / "in/a", "P")
    whole, core = box((4, 12), (4, 12), (1, 5)), box((6, 9), (6, 9), (2, 4))
    write_outline(tmp_path / "in/s.dcm", files, {"Whole": whole, "Core": core}, "20200101")
    refused = Site(run, tmp_path / "refused", ("--folder", tmp_path / "in"))
    output = refused.load(["P"], *SEG[:2], "--segments", "core=core", "--segments", "whole=whole", code=1)
    assert "overlap; --overlap priority" in output
    for first, second in (("core", "whole"), ("whole", "core")):
        site = Site(run, tmp_path / first, ("--folder", tmp_path / "in"))
        options = ("--labels", "seg", "--overlap", "priority", "--classes", "background,whole,core,vessel")
        options += ("--segments", f"{first}={first}", "--segments", f"{second}={second}")
        site.load(["P"], *options)
        expected = np.where(core, 2, whole) if first == "core" else whole
        np.testing.assert_array_equal(site.label("P"), expected)
        swapped = ("--segments", f"{second}={second}", "--segments", f"{first}={first}")
        assert "other settings" in site.load(["P"], *options[:6], *swapped, code=2)
    output = site.load(["P"], *options[:4], "--classes", "background,core", *options[6:], code=2)
    assert "--segments gives the class 'whole', and --classes has background, core" in output
    assert "background first" in site.load(["P"], *options[:4], "--classes", "core,whole", code=2)


def test_segments_without_a_class_are_refused(site, tmp_path):
    files = write_image(tmp_path / "in/a", "P")
    write_outline(tmp_path / "in/s.dcm", files, {"Tumour": BY_HAND, "Edema SECRET": OTHER}, "20200101")
    output = site.load(["P"], *SEG, code=1)
    assert "1 segment (number 2) would become background" in output
    assert "SECRET" not in output
    assert "Edema SECRET" in (site.state / "studies.json").read_text()
    named = Site(site.run, tmp_path / "named", site.source)
    named.load(["P"], *SEG, "--segments", "*=background")
    np.testing.assert_array_equal(named.label("P"), BY_HAND)


def test_points_and_empty_regions_are_no_structures(site, tmp_path):
    files = write_image(tmp_path / "in/a", "P")
    square = [(2.5, 3.5), (8.5, 3.5), (8.5, 8.5), (2.5, 8.5)]
    contours = {"Tumour": [(1, square), (2, square)], "Isocentre": [(1, square[:1])], "Edema": []}

    def change(dataset):
        dataset.ROIContourSequence[1].ContourSequence[0].ContourGeometricType = "POINT"

    write_rtstruct(tmp_path / "in/s.dcm", files, contours, change=change)
    site.load(["P"], "--labels", "rtstruct", "--segments", "tumour=tumour")
    np.testing.assert_array_equal(site.label("P"), BY_HAND)
