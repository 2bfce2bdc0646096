"""`medfedaug predict` on DICOM series: DICOM SEG, which lies on the series."""

import json
import sys

import numpy as np
import pydicom
import pytest
from finished_runs import rehashed
from written_series import series
from written_series import voxels as voxels
from written_volumes import AFFINE, itk_image, load_volume, turn, write, write_dicom

from medfedaug.data.io.formats import read_header
from medfedaug.hospital.dicom import segmentation as dicom_segmentation
from medfedaug.hospital.dicom.identity import ModelIdentity
from medfedaug.hospital.dicom.series import open_series

hd = pytest.importorskip("highdicom", reason="pip install 'medfedaug[dicom]'")

OBLIQUE = np.eye(4)
OBLIQUE[:3, :3] = turn(0.5, -0.3, 1.2) @ np.diag([0.8, 0.8, 3.0])
OBLIQUE[:3, 3] = (10, -20, 30)


def on_the_series(file, folder) -> np.ndarray:
    """Each segment on the grid of the series, (K, X, Y, Z): a frame belongs where its position is."""
    files = open_series(folder).files
    affine, shape = read_header(folder).affine, read_header(folder).shape
    segmentation = hd.seg.segread(file)
    assert segmentation.PatientID == "P7"
    sources = [pydicom.dcmread(f, stop_before_pixels=True) for f in files]
    assert (segmentation.StudyInstanceUID, segmentation.FrameOfReferenceUID) == (
        sources[0].StudyInstanceUID,
        "1.2.7",
    )
    assert segmentation.SeriesInstanceUID != sources[0].SeriesInstanceUID
    shared = segmentation.SharedFunctionalGroupsSequence[0]
    orientation = [float(v) for v in shared.PlaneOrientationSequence[0].ImageOrientationPatient]
    np.testing.assert_allclose(orientation, [float(v) for v in sources[0].ImageOrientationPatient])
    measures = shared.PixelMeasuresSequence[0]
    np.testing.assert_allclose([float(v) for v in measures.PixelSpacing], sources[0].PixelSpacing)
    frames = segmentation.pixel_array if segmentation.NumberOfFrames > 1 else segmentation.pixel_array[None]
    placed = np.zeros((len(segmentation.SegmentSequence), *shape), frames.dtype)
    for frame, group in zip(frames, segmentation.PerFrameFunctionalGroupsSequence, strict=True):
        position = np.array([float(v) for v in group.PlanePositionSequence[0].ImagePositionPatient])
        place = np.linalg.solve(affine, [*(position * (-1, -1, 1)), 1])[:3]
        np.testing.assert_allclose(place, np.rint(place), atol=1e-4)
        x, y, z = np.rint(place).astype(int)
        assert (x, y) == (0, 0)
        (source,) = group.DerivationImageSequence[0].SourceImageSequence
        assert source.ReferencedSOPInstanceUID == sources[z].SOPInstanceUID
        one = shared if "SegmentIdentificationSequence" in shared else group
        number = one.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        placed[number - 1, :, :, z] = frame.T
    return placed


@pytest.mark.parametrize("affine", [AFFINE, OBLIQUE], ids=["scanner", "oblique"])
def test_a_series_has_a_segmentation_that_lies_on_it(run, model, voxels, tmp_path, affine):
    """The same voxels in NIfTI have the same label map."""
    folder = series(tmp_path / "images/knee", voxels, affine, "1.2.3")
    write(tmp_path / "plain/knee.nii", load_volume(folder).numpy()[0], read_header(folder).affine)
    out = tmp_path / "out"
    for images in (tmp_path / "images", folder):  # a folder of series, and the series' own
        call = (
            "predict",
            "--model",
            model,
            "--images",
            images,
            "--out",
            out,
            "--probabilities",
            "--overwrite",
        )
        run.ok(*call, *(() if images == folder else ("--no-previews",)))
    plain = tmp_path / "plain.out"
    options = ("--no-previews", "--probabilities")
    assert run("predict", "--model", model, "--images", tmp_path / "plain", "--out", plain, *options)[0] == 0
    expected = load_volume(plain / "knee.nii").numpy()[0]
    assert 0 < expected.sum() < expected.size
    np.testing.assert_array_equal(on_the_series(out / "knee.dcm", folder)[0], expected)
    shares = load_volume(plain / "probabilities/knee.nii").numpy()[1]
    probabilities = on_the_series(out / "probabilities/knee.dcm", folder)[0]
    np.testing.assert_allclose(probabilities / 255, shares, atol=1 / 255)

    segment = hd.seg.segread(out / "knee.dcm").SegmentSequence[0]
    assert (segment.SegmentLabel, segment.SegmentAlgorithmType) == ("lesion", "AUTOMATIC")
    shown = hd.color.CIELabColor.from_dicom_value(segment.RecommendedDisplayCIELabValue)
    assert np.ptp(shown.to_rgb()) > 20, "a viewer would show it in grey"
    record = json.loads((out / "predictions.json").read_text())
    assert record["cases"]["knee"]["label_map"] == "knee.dcm"
    edges = np.linalg.norm(affine[:3, :3], axis=0)
    assert record["cases"]["knee"]["volume_ml"]["lesion"] == pytest.approx(
        expected.sum() * edges.prod() / 1000, rel=1e-4
    )
    assert (out / "previews/knee.png").exists()


def test_a_series_without_anything_found_has_a_segmentation_too(run, model, voxels, tmp_path):
    import torch

    empty = tmp_path / "run"
    empty.mkdir()
    for name in ("results.json", "global_model.pt"):
        (empty / name).write_bytes((model / name).read_bytes())
    weights = torch.load(empty / "global_model.pt", weights_only=True)
    weights["model.2.conv.bias"][0] += 1000
    torch.save(weights, empty / "global_model.pt")
    rehashed(empty)
    folder = series(tmp_path / "knee", voxels, AFFINE, "1.2.3")
    run.ok("predict", "--model", empty, "--images", folder, "--out", tmp_path / "out")
    assert not on_the_series(tmp_path / "out/knee.dcm", folder).any()


def test_a_series_without_a_patient_is_named_and_the_others_go_on(run, model, voxels, tmp_path):
    images, out = tmp_path / "images", tmp_path / "out"
    series(images / "whole", voxels, AFFINE, "1.2.3")
    write_dicom(images / "bare", itk_image(voxels, AFFINE), series="1.2.4")
    for file in (images / "bare").iterdir():
        slice_ = pydicom.dcmread(file)
        del slice_.PatientID
        slice_.save_as(file)
    code, _, err = run("predict", "--model", model, "--images", images, "--out", out, "--no-previews")
    assert code == 1
    (failed,) = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert failed.startswith("failed: bare: ")
    assert "its files have no PatientID" in failed
    assert sorted(path.name for path in out.iterdir()) == [
        "predictions.html",
        "predictions.json",
        "whole.dcm",
    ]


def test_without_highdicom_one_line_says_how_to_install_it(run, model, voxels, tmp_path, monkeypatch):
    folder = series(tmp_path / "knee", voxels, AFFINE, "1.2.3")
    monkeypatch.setitem(sys.modules, "highdicom", None)
    err = run.refused("predict", "--model", model, "--images", folder, "--out", tmp_path / "out")
    assert err.count("\n") == 1
    assert "pip install 'medfedaug[dicom]'" in err
    assert not (tmp_path / "out").exists()


def test_a_segment_has_the_note_on_its_class(voxels, tmp_path):
    folder = series(tmp_path / "knee", voxels, AFFINE, "1.2.3")
    labels = np.zeros(read_header(folder).shape, np.uint8)
    labels[0, 0, 0], labels[1, 1, 0] = 1, 2
    note = "kidney was never outlined at site B: its Dice is of other sites, 0.71 to 0.80"
    segments = dicom_segmentation.Segments(
        ("background", "liver", "kidney"), ModelIdentity("ab" * 32), notes={"kidney": note}
    )
    dicom_segmentation.write_segmentation(tmp_path / "seg.dcm", folder, labels, segments)
    written = pydicom.dcmread(tmp_path / "seg.dcm").SegmentSequence
    assert [segment.get("SegmentDescription") for segment in written] == [None, note]
