"""Kinds of images and label objects, imported from an archive, against independent readings."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import highdicom as hd
import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from dicom_files import EDGES, ORIGIN, affine_of, sets, write_frames, write_slices
from label_objects import sorted_slices, write_rtstruct, write_segmentation
from matplotlib.path import Path as Outline
from pydicom.uid import (
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    MRImageStorage,
    RLELossless,
    SecondaryCaptureImageStorage,
    generate_uid,
)
from written_volumes import load_volume

from medfedaug.hospital.pacs.archive import StudyQuery
from medfedaug.hospital.pacs.choice import plan_import
from medfedaug.hospital.pacs.importer import import_studies
from medfedaug.hospital.pacs.open_archive import open_archive
from medfedaug.hospital.pacs.settings import ImportSettings

VOXELS = np.random.default_rng(3).integers(-900, 900, (40, 36, 6)).astype(np.int16)
SYNTAXES = {"implicit": ImplicitVRLittleEndian, "jpeg2000": JPEG2000Lossless, "rle": RLELossless}
ANGLE = np.deg2rad(25)
OBLIQUE = np.array([[np.cos(ANGLE), -np.sin(ANGLE), 0], [np.sin(ANGLE), np.cos(ANGLE), 0], [0, 0, 1]])


def patient(name, **more):
    return sets(PatientID=name, **more)


def imported(run, tmp_path, *options, source=None, patients=("P",), code=0):
    """What was said, and by patient the image and the label map."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "studies.csv").write_text("PatientID\n" + "\n".join(patients) + "\n")
    out = tmp_path / "out/site_A"
    source = source or ("--folder", tmp_path / "in")
    call = ("import", *source, "--studies", tmp_path / "studies.csv", "--out", out, *options)
    status, output, err = run(*call)
    assert status == code, output + err
    cases = {}
    state = tmp_path / "out/site_A.state/studies.json"
    for case, entry in json.loads(state.read_text())["studies"].items() if state.is_file() else ():
        label = out / f"labels/{case}.nii.gz"
        images = [nibabel.load(file) for file in sorted((out / "images").glob(f"{case}*"))]
        cases[entry["PatientID"]] = (images, nibabel.load(label) if label.is_file() else None)
    return " ".join((output + err).split()), cases


def voxels_of(image):
    return np.asarray(image.dataobj)


def test_syntaxes_and_frames_in_odd_order_equal_independent_readings(orthanc, run, tmp_path):
    for name, syntax in SYNTAXES.items():
        write_slices(tmp_path / name, VOXELS, turned=OBLIQUE, syntax=syntax, change=patient(f"FORMAT-{name}"))
    order = [(0, k) for k in (3, 0, 5, 1, 4, 2)]
    rescale = lambda volume, k: (1.0 + k % 2, 10.0 * k)  # noqa: E731
    write_frames(tmp_path / "frames/f.dcm", [VOXELS], order, rescale=rescale, change=patient("FORMAT-frames"))
    orthanc.put(*(tmp_path / name for name in (*SYNTAXES, "frames")))
    names = [f"FORMAT-{name}" for name in (*SYNTAXES, "frames")]
    web = ("--dicomweb", orthanc.dicomweb)
    _, cases = imported(run, tmp_path, source=web, patients=names)
    for name in SYNTAXES:
        reader = sitk.ImageSeriesReader()
        expected = sitk.ReadImage(reader.GetGDCMSeriesFileNames(str(tmp_path / name)))
        (image,), _ = cases[f"FORMAT-{name}"]
        np.testing.assert_array_equal(voxels_of(image), sitk.GetArrayFromImage(expected).T)
        np.testing.assert_array_equal(voxels_of(image), VOXELS)
        headers = sorted_slices([*(tmp_path / name).iterdir()])
        np.testing.assert_allclose(image.affine, affine_of(headers), atol=1e-4)
    (image,), _ = cases["FORMAT-frames"]
    scaled = np.stack([VOXELS[..., k] * (1.0 + k % 2) + 10.0 * k for k in range(6)], axis=-1)
    np.testing.assert_array_equal(voxels_of(image), scaled)
    expected = np.diag([-EDGES[0], -EDGES[1], EDGES[2], 1.0])
    expected[:3, 3] = ORIGIN * [-1, -1, 1]
    np.testing.assert_allclose(image.affine, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["BINARY", "FRACTIONAL"])
def test_segments_in_odd_frames_equal_the_reading_of_highdicom(run, tmp_path, kind):
    files = write_slices(tmp_path / "in/image", VOXELS, turned=OBLIQUE, change=patient("P"))
    rng = np.random.default_rng(5)
    drawn = rng.integers(0, 4, VOXELS.shape)
    share = rng.uniform(0.3, 1, VOXELS.shape) if kind == "FRACTIONAL" else np.ones(VOXELS.shape)
    names = ("Edema", "Tumour core", "Vessel")
    masks = {name: (drawn == n) * share for n, name in enumerate(names, 1)}
    if kind == "BINARY":
        masks = {name: mask.astype(np.uint8) for name, mask in masks.items()}
    seg = write_segmentation(tmp_path / "in/seg.dcm", files, masks, kind, shuffled=True)
    options = ("--labels", "seg", "--segments", "tumour*=core", "--segments", "edema=edema")
    options += ("--segments", "*=background")
    _, cases = imported(run, tmp_path, *options)
    # highdicom rescales fractions to the share of their maximum.
    read = hd.seg.segread(seg).get_volume(rescale_fractional=True).array
    expected = np.zeros(VOXELS.shape, np.uint8)
    for index, name in ((2, "Edema"), (1, "Tumour core")):
        own = read[..., names.index(name)] >= 0.5
        expected[oriented(own, hd.seg.segread(seg), cases["P"][0][0].affine)] = index
    assert len(np.unique(expected)) == 3
    (image,), label = cases["P"]
    np.testing.assert_array_equal(voxels_of(label), expected)
    np.testing.assert_array_equal(label.affine, image.affine)
    listed = json.loads((tmp_path / "out/site_A/dataset.json").read_text())
    assert listed["labels"] == {"0": "background", "1": "core", "2": "edema"}


def test_a_map_of_labels_is_read_as_highdicom_reads_it(run, tmp_path):
    files = write_slices(tmp_path / "in/image", VOXELS, turned=OBLIQUE, change=patient("P"))
    drawn = np.random.default_rng(6).integers(0, 4, VOXELS.shape).astype(np.uint8)
    masks = {name: (drawn == n).astype(np.uint8) for n, name in enumerate(("Edema", "Core", "Vessel"), 1)}
    seg = write_segmentation(tmp_path / "in/seg.dcm", files, masks, "LABELMAP")
    written = pydicom.dcmread(seg)
    assert written.SOPClassUID == "1.2.840.10008.5.1.4.1.1.66.7"
    options = ("--labels", "seg", "--segments", "core=core", "--segments", "*=other")
    _, cases = imported(run, tmp_path, *options)
    expected = np.zeros(VOXELS.shape, np.uint8)
    volume = hd.seg.segread(seg).get_volume().array
    for name, number in (("Edema", 2), ("Core", 1), ("Vessel", 2)):
        own = volume[..., [*masks].index(name)] > 0 if volume.ndim > 3 else volume == [*masks].index(name) + 1
        expected[oriented(own, hd.seg.segread(seg), cases["P"][0][0].affine)] = number
    np.testing.assert_array_equal(voxels_of(cases["P"][1]), expected)
    np.testing.assert_array_equal(expected, np.array([0, 2, 1, 2])[drawn])


def short_pixels(dataset):
    dataset.PixelData = dataset.PixelData[: len(dataset.PixelData) // 4 * 2]


def other_segment(dataset):
    shared = dataset.SharedFunctionalGroupsSequence[0]
    shared.SegmentIdentificationSequence[0].ReferencedSegmentNumber = 7


def beyond_maximum(dataset):
    dataset.MaximumFractionalValue = 100


@pytest.mark.parametrize(
    ("kind", "damage", "output"),
    [
        ("BINARY", short_pixels, "a SEG is damaged: its pixels are"),
        ("FRACTIONAL", short_pixels, "a SEG is damaged: its pixels are"),
        ("BINARY", other_segment, "a segment that it does not describe"),
        ("FRACTIONAL", beyond_maximum, "values up to 255, above its maximum of 100"),
    ],
)
def test_a_segmentation_that_contradicts_itself_is_refused(run, tmp_path, kind, damage, output):
    files = write_slices(tmp_path / "in/image", VOXELS, change=patient("P"))
    mask = np.zeros(VOXELS.shape, np.uint8)
    mask[5:20, 8:30] = 1
    path = write_segmentation(tmp_path / "in/seg.dcm", files, mask, kind)
    damage(dataset := pydicom.dcmread(path))
    dataset.save_as(path)
    text, cases = imported(run, tmp_path, "--labels", "seg", code=1)
    assert output in text
    assert cases == {}


def oriented(mask, segmentation, affine):
    """A mask of highdicom's volume, (slice, row, column), as it lies on the grid of an affine in RAS."""
    volume = segmentation.get_volume(rescale_fractional=True)
    where = np.argwhere(mask)
    lps = np.c_[where, np.ones(len(where))] @ volume.affine.T
    index = lps @ np.diag([-1, -1, 1, 1]) @ np.linalg.inv(affine).T
    assert np.abs(index - np.rint(index)).max() < 1e-3
    result = np.zeros(VOXELS.shape, bool)
    result[tuple(np.rint(index[:, :3]).astype(int).T)] = True
    return result


def star(centre, radius, rng, points=9):
    """A polygon around a point, with corners at random distances."""
    angles = np.sort(rng.uniform(0, 2 * np.pi, points))
    far = radius * rng.uniform(0.6, 1.0, points)
    return np.c_[centre[0] + far * np.cos(angles), centre[1] + far * np.sin(angles)]


def test_contours_with_holes_and_keyholes_equal_matplotlibs_reading(run, tmp_path):
    voxels = np.zeros((48, 40, 6), np.int16)
    files = write_slices(tmp_path / "in/image", voxels, turned=OBLIQUE, change=patient("P"))
    rng = np.random.default_rng(7)
    x, y = np.meshgrid(range(48), range(40), indexing="ij")
    points = np.c_[x.ravel(), y.ravel()]
    expected = np.zeros(voxels.shape, np.uint8)
    regions = {"GTV": [], "Organ": []}

    def inside(polygon):
        return Outline(np.r_[polygon, polygon[:1]], closed=True).contains_points(points).reshape(x.shape)

    for k in range(6):
        outer, hole = star((13.2, 17.3), 11, rng), star((13.2, 17.3), 4, rng)
        other = star((35.4, 12.1), 8, rng)
        gtv = inside(outer) & ~inside(hole)
        if k % 2:  # the hole by a contour of its own
            regions["GTV"] += [(k, outer), (k, hole)]
        else:  # by a keyhole: in to the hole, around it, and back on the same way
            regions["GTV"] += [(k, np.r_[outer, outer[:1], hole, hole[:1], outer[:1]])]
        regions["Organ"] += [(k, other)]
        expected[..., k][gtv] = 1
        expected[..., k][inside(other)] = 2
    write_rtstruct(tmp_path / "in/rt.dcm", files, regions)
    options = ("--labels", "rtstruct", "--segments", "gtv=target", "--segments", "organ=organ")
    _, cases = imported(run, tmp_path, *options)
    label = voxels_of(cases["P"][1])
    # A millionth of a millimetre of rounding may decide over a voxel that an outline runs through.
    assert (label != expected).sum() <= 1
    assert all((label == index).sum() > 200 for index in (1, 2))


def sequences(root, name, study, *, frame="1.2.3.9"):
    """T1 on a coarser grid, and FLAIR with a label map, of one study; files of FLAIR."""
    common = {"FrameOfReferenceUID": frame, "Modality": "MR"}
    change = patient(name, SeriesDescription="t1 ax", SeriesNumber=2, **common)
    coarse = np.random.default_rng(1).integers(0, 900, (20, 18, 6)).astype(np.int16)
    edges = (2 * EDGES[0], 2 * EDGES[1], EDGES[2])
    write_slices(root / "t1", coarse, study=study, sop=MRImageStorage, edges=edges, change=change)
    change = patient(name, SeriesDescription="FLAIR ax", SeriesNumber=3, **common)
    flair = write_slices(root / "flair", VOXELS, study=study, sop=MRImageStorage, change=change)
    mask = np.zeros(VOXELS.shape, np.uint8)
    mask[3:9, 4:8, 1:4] = 1
    write_segmentation(root / "seg.dcm", flair, mask)
    return flair, mask


def test_sequences_become_channels_on_the_grid_of_the_label_map(run, tmp_path):
    _, mask = sequences(tmp_path / "in", "P", generate_uid())
    source = ("--folder", tmp_path / "in")
    rules = ("--channel", "T1=t1", "--channel", "FLAIR=.*flair.*", "--labels", "seg")
    output, cases = imported(run, tmp_path, *rules)
    assert "channel T1" in output
    assert "channel FLAIR" in output
    (flair, t1), label = cases["P"]  # sorted by file name
    np.testing.assert_array_equal(voxels_of(flair), VOXELS)
    np.testing.assert_array_equal(voxels_of(label), mask)
    assert t1.shape == flair.shape == label.shape
    np.testing.assert_array_equal(t1.affine, flair.affine)
    # By SimpleITK's own reading of both series.
    reader = sitk.ImageSeriesReader()
    t1_dicom, flair_dicom = (
        sitk.ReadImage(reader.GetGDCMSeriesFileNames(str(tmp_path / "in" / name)), sitk.sitkFloat32)
        for name in ("t1", "flair")
    )
    lowest = float(sitk.GetArrayFromImage(t1_dicom).min())
    expected = sitk.Resample(t1_dicom, flair_dicom, sitk.Transform(), sitk.sitkLinear, lowest)
    np.testing.assert_allclose(voxels_of(t1), sitk.GetArrayFromImage(expected).T, atol=1e-2)
    listed = json.loads((tmp_path / "out/site_A/dataset.json").read_text())
    assert listed["channel_names"] == {"0": "T1", "1": "FLAIR"}
    (row,) = listed["test"]
    assert [path.rsplit("_", 1)[1] for path in row["image"]] == ["T1.nii.gz", "FLAIR.nii.gz"]
    output, _ = imported(
        run, tmp_path / "b", "--channel", "T2=t2", "--channel", "T1=t1", source=source, code=1
    )
    assert "no series is a channel T2" in output


def test_label_maps_choose_among_possible_images(run, tmp_path):
    _, mask = sequences(tmp_path / "in", "P", generate_uid())
    source = ("--folder", tmp_path / "in")
    output, _ = imported(run, tmp_path / "a", source=source, code=1)
    assert "2 series are a possible image, expected one; choose with --series" in output
    output, cases = imported(run, tmp_path / "b", "--labels", "seg", source=source)
    (image,), label = cases["P"]
    np.testing.assert_array_equal(voxels_of(image), VOXELS)
    np.testing.assert_array_equal(voxels_of(label), mask)


def test_a_series_in_colour_has_its_colours_as_channels(run, tmp_path):
    colours = np.random.default_rng(4).integers(0, 255, (*VOXELS.shape, 3)).astype(np.uint8)

    def change(header, k):
        header.PatientID, header.SamplesPerPixel, header.PhotometricInterpretation = "P", 3, "RGB"
        header.BitsAllocated, header.BitsStored, header.HighBit = 8, 8, 7
        header.PlanarConfiguration = header.PixelRepresentation = 0
        header.PixelData = np.ascontiguousarray(colours[:, :, k].transpose(1, 0, 2)).tobytes()

    write_slices(tmp_path / "in", VOXELS, sop=SecondaryCaptureImageStorage, change=change)
    _, cases = imported(run, tmp_path, "--allow-burned-in")
    ((image,), _) = cases["P"]
    np.testing.assert_array_equal(voxels_of(image), colours)
    read = load_volume(Path(image.get_filename())).numpy()
    np.testing.assert_array_equal(read, np.moveaxis(colours, -1, 0))


@pytest.mark.parametrize(("kept", "output"), [(200, "cannot be"), (0.9, "its pixels are .* bytes, and")])
def test_a_volume_without_its_last_slice_is_refused(tmp_path, kept, output):
    """The object is cut in its header, or in its pixels: no gap tells that a slice is missing at the end."""
    files = write_slices(tmp_path / "in", VOXELS, change=patient("P"))
    last = max(files, key=lambda file: pydicom.dcmread(file).InstanceNumber)
    with damaged_later(tmp_path, last, kept) as archive:
        plans = plan_import(
            archive, [StudyQuery("PatientID", "P")], lambda name, kind: kind, ImportSettings()
        )
        done = import_studies(
            archive, plans, tmp_path / "out", tmp_path / "state", ImportSettings(), lambda uid: uid
        )
    assert done.problems == {"case": done.problems["case"]}
    assert re.search(output, done.problems["case"])
    assert not (tmp_path / "out/images").exists()


@contextmanager
def damaged_later(tmp_path, damaged, kept):
    """The folder as an archive whose index was made before an object was damaged."""
    with open_archive(folder=tmp_path / "in") as archive:
        archive.find_studies(StudyQuery("PatientID", "P"))
        content = damaged.read_bytes()
        damaged.write_bytes(content[: kept if kept > 1 else int(len(content) * kept)])
        yield archive
