"""DICOM as archives write it: voxels as an independent reading has them, all else named with the reason."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from dicom_files import EDGES, affine_of, sets, write_frames, write_object, write_slices
from hospitals import Hospital
from pydicom.pixels import get_decoder
from pydicom.uid import UID, SecondaryCaptureImageStorage
from written_volumes import load_volume, turn, write

from medfedaug.data.io.formats import read_header
from medfedaug.data.sites import open_site
from medfedaug.errors import DataError
from medfedaug.federation.messages.messages import PREPARE, Request

hd = pytest.importorskip("highdicom", reason="pip install 'medfedaug[dicom]'")

VOXELS = np.random.default_rng(0).integers(-900, 900, (5, 6, 7)).astype(np.int16)
RTSTRUCT, SR = "1.2.840.10008.5.1.4.1.1.481.3", "1.2.840.10008.5.1.4.1.1.88.11"
VIDEO, HTJ2K = UID("1.2.840.10008.1.2.4.100"), UID("1.2.840.10008.1.2.4.201")
PLACE = np.diag([-0.9, -1.1, 3.0, 1])
PLACE[:3, 3] = (80, 90, -40)


def independent(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Voxels as GDCM reads each file by itself, the same by pydicom, and the affine."""
    headers = {path: pydicom.dcmread(path) for path in folder.iterdir()}
    first = next(iter(headers.values()))
    normal = np.cross(*np.reshape([float(v) for v in first.ImageOrientationPatient], (2, 3)))
    along = {
        path: float(normal @ [float(v) for v in one.ImagePositionPatient]) for path, one in headers.items()
    }
    paths = sorted(headers, key=along.__getitem__)
    by_gdcm = [sitk.GetArrayFromImage(sitk.ReadImage(str(path), sitk.sitkFloat32))[0].T for path in paths]
    own = [
        (headers[p].pixel_array * float(headers[p].RescaleSlope) + float(headers[p].RescaleIntercept)).T
        for p in paths
    ]
    return np.stack(by_gdcm, -1), np.stack(own, -1), affine_of([headers[p] for p in paths])


def with_values(**values):
    return {"change": sets(**values)}


SCOUT = with_values(ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])
SERIES = {
    "axial": {},
    "oblique": {"turned": turn(0.3, -0.2, 0.15)},
    "coronal": {"turned": np.array([[1.0, 0, 0], [0, 0, 1], [0, -1, 0]])},
    "feet first": {"turned": np.diag([1.0, -1, -1])},
    "tilted": {"shift": 0.8},
    "no suffix": {"name": lambda header, k: f"IM{k:05d}"},
    "a slope a slice": with_values(RescaleSlope=lambda k: 1 + k / 4, RescaleIntercept=lambda k: -k),
    "no patient": with_values(PatientID="", PatientName="", StudyID=""),
}


@pytest.mark.parametrize("kind", SERIES)
def test_voxels_and_affine_equal_an_independent_reading(tmp_path, kind):
    write_slices(tmp_path / "s", VOXELS, **SERIES[kind])
    by_gdcm, own, affine = independent(tmp_path / "s")
    volume, header = load_volume(tmp_path / "s"), read_header(tmp_path / "s")
    np.testing.assert_array_equal(volume.numpy()[0], by_gdcm)
    np.testing.assert_allclose(volume.numpy()[0], own, rtol=1e-6)
    assert header.shape == VOXELS.shape
    np.testing.assert_allclose(header.affine, affine, atol=1e-5)


@pytest.mark.skipif(shutil.which("gdcmconv") is None, reason="needs gdcmconv: apt-get install libgdcm-tools")
@pytest.mark.parametrize("how", ["--j2k", "--jpeg"])
def test_jpeg_2000_and_lossless_jpeg_are_read(tmp_path, how):
    (tmp_path / "packed").mkdir()
    voxels = np.random.default_rng(2).integers(-900, 900, (24, 28, 3))
    for file in write_slices(tmp_path / "plain", voxels):
        subprocess.run(["gdcmconv", how, file, tmp_path / "packed" / file.name], check=True)
    packed = pydicom.dcmread(next((tmp_path / "packed").iterdir()))
    assert packed.file_meta.TransferSyntaxUID.is_encapsulated
    plain, packed_volume = (load_volume(tmp_path / name) for name in ("plain", "packed"))
    np.testing.assert_array_equal(packed_volume.numpy(), plain.numpy())
    np.testing.assert_array_equal(packed_volume.numpy()[0], voxels)


def test_frames_are_ordered_by_their_positions(tmp_path):
    """Their distance is that of the positions, and not the thickness that the header gives."""

    def rescale(volume, k):
        return 1 + k / 4, -5.0 * k

    def invert(header):
        header.PhotometricInterpretation = "MONOCHROME1"

    order = [(0, int(k)) for k in np.random.default_rng(1).permutation(VOXELS.shape[2])]
    path = write_frames(tmp_path / "s/1", [VOXELS], order, rescale=rescale)
    other = write_frames(tmp_path / "white/1", [VOXELS], order, rescale=rescale, change=invert)
    factors = np.array([rescale(0, k) for k in range(VOXELS.shape[2])])
    for source, stored in ((path, VOXELS), (path.parent, VOXELS), (other, -1 - VOXELS)):
        header, read = read_header(source), load_volume(source)
        np.testing.assert_array_equal(read.numpy()[0], stored * factors[:, 0] + factors[:, 1])
        np.testing.assert_allclose(header.edges, EDGES, rtol=1e-6)
        np.testing.assert_allclose(header.affine @ [0, 0, 2, 1], [80, 90, -40 + 2 * EDGES[2], 1], rtol=1e-6)


@pytest.fixture(scope="module")
def head(phantom_dir):
    image = load_volume(next((phantom_dir / "site_C/images").glob("*.nii.gz"))).numpy()[0]
    voxels = np.rint((image - image.min()) / (image.max() - image.min()) * 4000).astype(np.int16)
    return np.concatenate([voxels, voxels[:, :, -1:] + 9], axis=2)


@pytest.fixture
def predict(run, model, tmp_path):
    """Call the command; returns the exit code, the lines of the standard error and the record."""

    def call(images, *options, out="out"):
        arguments = (
            "predict",
            "--model",
            model,
            "--images",
            images,
            "--out",
            tmp_path / out,
            "--no-previews",
        )
        code, _, err = run(*arguments, *options)
        record = tmp_path / out / "predictions.json"
        return code, err.splitlines(), json.loads(record.read_text()) if record.exists() else {}

    return call


def lesion(file: Path, frames: int) -> np.ndarray:
    """A binary SEG of one segment as (X, Y, Z), by the positions of its frames along z."""
    segmentation = hd.seg.segread(file)
    pixels = segmentation.pixel_array if segmentation.NumberOfFrames > 1 else segmentation.pixel_array[None]
    placed = np.zeros((*pixels.shape[:0:-1], frames), np.uint8)
    for frame, group in zip(pixels, segmentation.PerFrameFunctionalGroupsSequence, strict=True):
        z = (float(group.PlanePositionSequence[0].ImagePositionPatient[2]) + 40) / EDGES[2]
        assert abs(z - round(z)) < 1e-3
        placed[:, :, round(z)] = frame.T
    return placed


@pytest.fixture
def expected(predict, head, tmp_path):
    """The label map of the head as NIfTI."""
    write(tmp_path / "plain/head.nii", head.astype(np.float32), PLACE)
    assert predict(tmp_path / "plain", out="plain.out")[0] == 0
    label = load_volume(tmp_path / "plain.out/head.nii").numpy()[0]
    assert 0 < label.sum() < label.size
    return label


@pytest.fixture
def no_htj2k_decoder(monkeypatch):
    """pydicom as it is where the packages for HTJ2K are not installed."""
    decoder = get_decoder(HTJ2K)
    monkeypatch.setattr(decoder, "_available", {})
    monkeypatch.setattr(decoder, "_unavailable", {"pylibjpeg": ("pylibjpeg>=2.0", "pylibjpeg-openjpeg>=2.0")})


@pytest.mark.usefixtures("no_htj2k_decoder")
def test_an_archive_is_walked_and_all_that_is_left_out_is_named(predict, head, expected, tmp_path):
    root = tmp_path / "archive"
    numbered = {"name": lambda header, k: f"IM{k:05d}"}
    write_slices(root / "P1/STUDY/CT", head, **numbered)
    write_object(root / "P1/STUDY/SEG/1", Modality="SEG")
    write_object(root / "P1/STUDY/CT/rt", RTSTRUCT, Modality="RTSTRUCT")
    write_slices(root / "P2/a/b/c/d", head, **numbered)
    for half in (0, 1):  # one series, spread over folders as some exports do
        keep = {"change": lambda header, k, half=half: k // 4 == half}
        write_slices(root / f"P3/{half}", head, study="1.2.3", series="1.2.3.4", **keep, **numbered)
    write_slices(root / "P4", head, study="1.2.4", **numbered)
    write_slices(
        root / "P4", head[:, :, :1], study="1.2.4", sop=SecondaryCaptureImageStorage, name=lambda h, k: "SC"
    )
    write_slices(root / "P5/gap", head, skip=[3])
    write_slices(root / "P5/double", head)
    again = pydicom.dcmread(next((root / "P5/double").iterdir()))
    again.SOPInstanceUID = again.file_meta.MediaStorageSOPInstanceUID = "1.2.7"
    again.save_as(root / "P5/double/again")
    write_slices(root / "P5/spacing", head, **with_values(PixelSpacing=lambda k: [1.1, 0.9 + (k > 4)]))
    write_slices(root / "P5/cine", head, **with_values(ImagePositionPatient=[0, 0, 0]))
    for name, syntax in (("video", VIDEO), ("htj2k", HTJ2K)):
        for file in write_slices(root / "P5" / name, head):
            packed = pydicom.dcmread(file)
            packed.file_meta.TransferSyntaxUID = syntax
            packed.PixelData = pydicom.encaps.encapsulate([b"\x00\x01"])
            packed.save_as(file)
    frames = write_frames(root / "P5/frames/1", [head], [(0, k) for k in range(7)])
    bare = pydicom.dcmread(frames)
    del bare.PerFrameFunctionalGroupsSequence
    bare.save_as(frames)
    (root / "viewer").mkdir()
    (root / "viewer/autorun.inf").write_text("[autorun]")
    (root / "viewer/empty").touch()
    (root / "viewer/gone").symlink_to(root / "nowhere")
    (root / "viewer/loop").symlink_to(root)
    (root / "viewer/damaged").write_bytes(bytes(128) + b"DICM" + b"\x08\x00\x05" * 40)
    os.mkfifo(root / "viewer/pipe")
    write(root / "labels/P1.nii", np.zeros(head.shape))

    code, err, record = predict(root)
    assert code == 1
    assert set(record["cases"]) == {"P1/STUDY/CT", "P2/a/b/c/d", "P3", "P4"}
    for name in record["cases"]:
        np.testing.assert_array_equal(lesion(tmp_path / f"out/{name}.dcm", head.shape[2]), expected)
    for name, words in {
        "P5/gap": "slices are missing, double or uneven: 6 slices, 3 to 6 mm apart",
        "P5/double": "slices are missing, double or uneven: 8 slices, 0 to 3 mm apart; look at",
        "P5/spacing": "its slices differ in pixel spacing: 5 of 1.1 x 0.9, 2 of 1.1 x 1.9",
        "P5/cine": "its 7 slices lie in one place",
        "P5/frames": "all its slices are in one file, which does not say where each lies",
        "P5/video": "compressed as MPEG2 Main Profile / Main Level, which nothing here can read",
        "P5/htj2k": "compressed as High-Throughput JPEG 2000 Image Compression (Lossless Only), which needs "
        "packages that are not installed: pip install pylibjpeg pylibjpeg-openjpeg",
    }.items():
        assert words in record["failed"][name]["error"]
        assert sum(line.startswith(f"failed: {name}: ") for line in err) == 1
    assert len(record["failed"]) == 7
    left_out = {(entry["path"], entry["reason"]) for entry in record["left_out"]}
    for path, words in {
        "P1/STUDY/SEG": "1 file: DICOM SEG (1)",
        "P1/STUDY/CT": "1 file: RTSTRUCT (rt)",
        "P4": "a secondary capture; --series takes it",
        "viewer/loop": "a link to a folder that is looked at already",
        "labels": "label maps, by its name",
    }.items():
        assert any(path == place and words in reason for place, reason in left_out), path
    viewer = sorted(reason.partition(": ")[2] for place, reason in left_out if place == "viewer")
    assert [text.split(" (")[0] for text in viewer] == [
        "cannot be opened",
        "no DICOM file",
        "object without a class",
    ]
    for place, reason in left_out:
        assert f"left out: {place}: {reason}" in err
    assert not any("Doe" in line or "PID" in line for line in err)


def test_several_volumes_are_named_and_series_chooses(predict, head, expected, tmp_path):
    root = tmp_path / "archive"

    other = (head // 2).astype(np.int16)
    for number, voxels in ((1, head), (2, other)):
        write_slices(
            root / "echoes", voxels, study="1.2.1", series="1.2.1.1", **with_values(EchoTime=10 * number)
        )
        phase = with_values(TemporalPositionIdentifier=number)
        write_slices(root / "phases", voxels, study="1.2.2", series="1.2.2.1", **phase)
    for number, name in ((1, "T1 native"), (2, "T1 with contrast")):
        named = with_values(SeriesDescription=name)
        write_slices(root / "two", head, study="1.2.3", series=f"1.2.3.{number}", **named)
    order = [(volume, k) for k in (3, 1, 0, 5, 6, 2, 4) for volume in (1, 0)]
    write_frames(root / "frames/1", [head, other], order)
    code, err, record = predict(root)
    assert code == 1
    failed = {name: entry["error"] for name, entry in record["failed"].items()}
    assert set(failed) == {"echoes", "phases", "two", "frames"}
    assert "holds 2 volumes of one DICOM series, expected one" in failed["echoes"]
    for name, words in {
        "echoes": ["echo time 10 ms", "echo time 20 ms"],
        "phases": ["phase 1", "phase 2"],
        "two": ["holds 2 DICOM series", "T1 native", "T1 with contrast", "UID 1.2.3.2"],
        "frames": ["echo time 10 ms", "echo time 20 ms"],
    }.items():
        assert all(word in failed[name] for word in [*words, "7 slices", "--series REGEX or UID"]), name
    for pattern, name in (
        ("echo time 10 ms", "echoes"),
        ("PHASE 1\\b", "phases"),
        ("1.2.3.1", "two"),
        ("native", "two"),
    ):
        code, err, record = predict(root, "--series", pattern, "--overwrite")
        assert name in record["cases"], err
        np.testing.assert_array_equal(lesion(tmp_path / f"out/{name}.dcm", head.shape[2]), expected)
        assert any("not what --series names" in entry["reason"] for entry in record["left_out"])
    code, err, _ = predict(root, "--series", "no such thing", out="none")
    assert code == 2
    assert len(err) == 1
    assert "holds no image" in err[0]
    assert "not what --series names" in err[0]
    assert "is not a regular expression" in predict(root, "--series", "(", out="none")[1][-1]
    # What one call predicted, another of other series does not go on with.
    assert "other options: series" in predict(root, "--series", "echo time 20", out="out")[1][-1]


def test_a_slice_of_another_orientation_is_no_slice_of_the_volume(predict, head, expected, tmp_path):
    """A scout in the same series, also where a scanner does not mark it as one."""
    root = tmp_path / "archive"
    write_slices(root / "p", head, study="1.2.1", series="1.2.1.1")
    sagittal = np.array([[0.0, 0, 1], [1, 0, 0], [0, 1, 0]])
    write_slices(root / "p", head[:, :, :1], turned=sagittal, study="1.2.1", series="1.2.1.1")
    code, err, record = predict(root)
    assert code == 0, err
    np.testing.assert_array_equal(lesion(tmp_path / "out/p.dcm", head.shape[2]), expected)
    assert "a single slice beside a volume; --series takes it" in record["left_out"][0]["reason"]


def test_an_enhanced_file_is_predicted_and_its_segmentation_lies_on_it(predict, head, expected, tmp_path):
    path = write_frames(tmp_path / "enhanced", [head], [(0, k) for k in (3, 1, 0, 5, 6, 2, 4)])
    code, err, record = predict(path)
    assert code == 0, err
    np.testing.assert_array_equal(lesion(tmp_path / "out/enhanced.dcm", head.shape[2]), expected)
    volume = record["cases"]["enhanced"]["volume_ml"]["lesion"]
    assert volume == pytest.approx(expected.sum() * np.prod(EDGES) / 1000, rel=1e-4)


def test_a_tilted_series_says_so_and_has_its_true_volume(predict, head, tmp_path):
    write_slices(tmp_path / "ct", head, shift=0.8)
    code, err, record = predict(tmp_path / "ct")
    assert code == 0, err
    assert any("ct: its slices are sheared by 14.9 degrees" in line for line in err)
    case = record["cases"]["ct"]
    assert "tilted gantry" in case["remarks"][0]
    assert case["volume_ml"]["lesion"] == pytest.approx(
        case["voxels"]["lesion"] * np.prod(EDGES) / 1000, rel=1e-4
    )


def test_one_file_stands_for_its_series(predict, head, expected, tmp_path):
    write_slices(tmp_path / "s", head)
    code, err, record = predict(next((tmp_path / "s").iterdir()), out="single")
    assert code == 0, err
    (case,) = record["cases"].values()
    np.testing.assert_array_equal(lesion(tmp_path / "single" / case["label_map"], head.shape[2]), expected)


def test_init_takes_a_folder_with_one_series_as_an_image(run, head, tmp_path):
    site = tmp_path / "site"
    label = np.zeros(head.shape, np.uint8)
    label[4:9, 5:9, 2:5] = 1
    for number in range(4):
        voxels = (head + number).astype(np.int16)
        write_slices(site / f"images/p{number}/STUDY/SERIES", voxels, study=f"1.2.{number}")
        write(site / f"labels/p{number}.nii.gz", label, PLACE)
    run.ok("init", site, "--yes")
    content = json.loads((site / "dataset.json").read_text())
    rows = [row for split in ("training", "validation", "test") for row in content[split]]
    assert {row["image"] for row in rows} == {f"images/p{k}" for k in range(4)}
    assert run("inspect", "--data", site, "--out", tmp_path / "page.html")[0] == 0


def test_a_sites_error_about_its_series_names_none_of_them_to_the_server(make_site, tiny_config, tmp_path):
    site = make_site("A")
    for number in (1, 2):
        named = with_values(SeriesDescription=f"Doe knee {number}")
        write_slices(site / "images/series", VOXELS, study="1.2.3", series=f"1.2.3.{number}", **named)
    listing = site / "dataset.json"
    listing.write_text(listing.read_text().replace("images/0.nii.gz", "images/series"))
    free = {"allow_limit": True}
    hospital = Hospital(tmp_path / "kits/A", site, privacy={"min_images": 1}, jobs=free)
    hospital.start(tiny_config("fedavg"), "job-1")
    reply = hospital.answer(Request(PREPARE))
    assert "cannot be read as an image" in reply.error
    assert not any(word in reply.error for word in ("Doe", "1.2.3", "CT", "series", "slice"))
    assert "Doe knee 2" in str(_error(site))


def _error(site):
    with pytest.raises(DataError) as caught:
        open_site(site).check_files()
    return caught.value
