"""Identity in many tags, looked for in all that an import leaves; and objects without it."""

import gzip
import json

import nibabel
import numpy as np
import pydicom
import pytest
from dicom_files import sets, write_object, write_slices
from label_objects import write_rtstruct, write_segmentation
from planted import plant, values
from pydicom.uid import DigitalXRayImageStorageForPresentation, JPEG2000Lossless, generate_uid

from medfedaug.data.preparation.cache import CaseCache

VOXELS = np.random.default_rng(0).integers(-900, 900, (40, 36, 4)).astype(np.int16)
MASK = np.zeros(VOXELS.shape, np.uint8)
MASK[5:12, 6:20, 1:3] = 1


def contents(*folders, leave_out=()):
    """Names and decompressed contents of all files."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path in leave_out:
                continue
            yield str(path), str(path).encode()
            if path.is_file():
                yield (
                    str(path),
                    gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes(),
                )


def found_in(planted, texts):
    return sorted({(value, name) for name, text in texts for value in planted if value.encode() in text})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A study with a SEG and an RTSTRUCT, all with identity, and a study whose slices are uneven."""
    root = tmp_path_factory.mktemp("planted")
    files = write_slices(root / "a/image", VOXELS, change=plant, syntax=JPEG2000Lossless)
    write_segmentation(root / "a/seg.dcm", files, {"Tumour of PLANT39": MASK})
    square = [(4.5, 5.5), (11.5, 5.5), (11.5, 19.5), (4.5, 19.5)]
    contours = {"GTV of PLANT40": [(1, square), (2, square)]}
    write_rtstruct(root / "a/rt.dcm", files, contours)
    for file in (root / "a").glob("*.dcm"):
        dataset = pydicom.dcmread(file)
        plant(dataset)
        if file.name == "seg.dcm":
            dataset.SegmentSequence[0].SegmentDescription = "PLANT41"
        dataset.save_as(file)
    write_slices(root / "b", VOXELS, change=plant, skip=[1], study=(study := generate_uid()))
    for modality in ("SEG", "RTSTRUCT"):
        path = write_object(root / f"b/{modality}.dcm", study=study, Modality=modality)
        plant(dataset := pydicom.dcmread(path))
        dataset.save_as(path)
    return root


PLANTED = [*values(), "PLANT39", "PLANT40", "PLANT41"]


def uids_of(root):
    uids = set()
    for file in root.rglob("*"):
        if file.is_file():
            header = pydicom.dcmread(file, stop_before_pixels=True)
            uids |= {header.StudyInstanceUID, header.SeriesInstanceUID, header.SOPInstanceUID}
    return sorted(uids)


def imported(run, folder, tmp_path, *options, name="site_A"):
    (tmp_path / "studies.csv").write_text("PatientID\nPLANT02\n")
    arguments = ("--studies", tmp_path / "studies.csv", "--out", tmp_path / "out" / name)
    return run("import", "--folder", folder, *arguments, *options)


@pytest.mark.parametrize("labels", ["seg", "rtstruct"])
def test_no_planted_tag_leaves_the_sites_own_list(run, source, tmp_path, labels, caplog, recwarn):
    options = ("--labels", labels, "--segments", "*=tumour", "--anonymise")
    (tmp_path / "out").mkdir()
    code, out, err = imported(run, source, tmp_path, *options, "--json", tmp_path / "out/plan.json")
    assert code == 1  # of the study with uneven slices
    assert "uneven" in err
    own = tmp_path / "out/site_A.state/studies.json"
    texts = [*contents(tmp_path / "out", leave_out=[own])]
    texts += [("output", (out + err).encode()), ("log", caplog.text.encode())]
    texts += [("warning", str(one.message).encode()) for one in recwarn]
    assert found_in([*PLANTED, *uids_of(source)], texts) == []
    assert "PLANT02" in own.read_text()
    assert len([*(tmp_path / "out/site_A/images").iterdir()]) == 1


@pytest.mark.parametrize("labels", ["seg", "rtstruct"])
def test_objects_without_identity_refer_to_each_other_and_give_the_same_case(run, source, tmp_path, labels):
    options = ("--labels", labels, "--segments", "*=tumour", "--anonymise")
    assert imported(run, source, tmp_path, *options)[0] == 1
    (folder,) = (tmp_path / "out/site_A/dicom").iterdir()
    objects = [pydicom.dcmread(file) for file in folder.iterdir()]
    assert len(objects) == 5
    for one in objects:
        assert one.PatientIdentityRemoved == "YES"
        (code,) = one.DeidentificationMethodCodeSequence
        assert (code.CodeValue, code.CodingSchemeDesignator) == ("113100", "DCM")
        assert one.PatientID.startswith("patient-")
        assert one.file_meta.MediaStorageSOPInstanceUID == one.SOPInstanceUID
        assert not [element for element in one.iterall() if element.tag.is_private]
    images = {one.SOPInstanceUID: one for one in objects if one.Modality == "CT"}
    originals = {one.InstanceNumber: one for one in map(pydicom.dcmread, (source / "a/image").iterdir())}
    for one in images.values():
        np.testing.assert_array_equal(one.pixel_array, originals[one.InstanceNumber].pixel_array)
        assert b"Created by OpenJPEG" in originals[one.InstanceNumber].PixelData
        assert b"Created by" not in one.PixelData
        assert one.ImagePositionPatient == originals[one.InstanceNumber].ImagePositionPatient
    # A search by the site's pseudonym finds the objects.
    patient = next(iter(images.values())).PatientID
    (tmp_path / "again.csv").write_text(f"PatientID\n{patient}\n")
    again = tmp_path / "again/site_B"
    arguments = (
        "--studies",
        tmp_path / "again.csv",
        "--out",
        again,
        "--labels",
        labels,
        "--segments",
        "tumour=tumour",
    )
    run.ok("import", "--folder", folder, *arguments)
    for kind, expected in (("images", VOXELS), ("labels", MASK)):
        (first,), (second,) = ([*(root / kind).iterdir()] for root in (tmp_path / "out/site_A", again))
        np.testing.assert_array_equal(np.asarray(nibabel.load(first).dataobj), expected)
        np.testing.assert_array_equal(np.asarray(nibabel.load(second).dataobj), expected)
    code, _, err = imported(run, source, tmp_path, *options[:-1])
    assert "other settings" in " ".join(err.split())


def prepare(cache, image):
    """Keep an image in the folder of prepared images, as a run does."""
    import torch

    from medfedaug.config.machine import Machine

    CaseCache(Machine(0, cache)).get((str(image),), lambda: {"image": torch.zeros(2, 3)}, [image])


def test_a_withdrawal_reaches_objects_and_caches_and_is_finished_when_killed(
    run, source, tmp_path, monkeypatch
):
    from medfedaug.hospital.pacs import import_folder

    options = ("--labels", "seg", "--segments", "*=tumour", "--anonymise")
    assert imported(run, source, tmp_path, *options)[0] == 1
    out, cache = tmp_path / "out/site_A", tmp_path / "cache"
    (image,) = (out / "images").iterdir()
    for path in (image, tmp_path / "other.nii.gz"):
        prepare(cache, path)
    (cache / "notes.txt").write_text("of the site")
    assert len([*cache.iterdir()]) == 3
    (tmp_path / "gone.csv").write_text("PatientID\nPLANT02\n")
    code, _, err = run("import", "--withdraw", tmp_path / "gone.csv", "--out", tmp_path / "elsewhere")
    assert code != 0
    assert "no list of imported studies" in " ".join(err.split())
    assert not (tmp_path / "elsewhere.state").exists()

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(import_folder, "remove_prepared", kill)
        with pytest.raises(Killed):
            run("import", "--withdraw", tmp_path / "gone.csv", "--out", out, "--cache", cache)
    assert image.exists()
    # The next import finishes it, and knows the cache from the list.
    code, _, err = imported(run, source, tmp_path, *options)
    assert code == 1
    assert "withdrawn" in err
    assert not [path for kind in ("images", "labels", "dicom") for path in (out / kind).iterdir()]
    assert sorted(path.name for path in cache.iterdir())[-1] == "notes.txt"
    assert len([*cache.iterdir()]) == 2
    assert not [
        row
        for part in ("training", "validation", "test")
        for row in json.loads((out / "dataset.json").read_text())[part]
    ]
    own = json.loads((tmp_path / "out/site_A.state/studies.json").read_text())
    assert own["studies"] == {}
    assert own["caches"] == []
    assert found_in([*PLANTED, *uids_of(source)], contents(tmp_path / "out")) == []


def test_a_study_that_cannot_be_kept_without_identity_leaves_nothing(run, tmp_path):
    """Its image is written before its objects, and no withdrawal finds what no list has."""
    named = sets(PatientID="PLANT02")
    files = write_slices(tmp_path / "in/a", VOXELS, sop=DigitalXRayImageStorageForPresentation, change=named)
    write_segmentation(tmp_path / "in/seg.dcm", files, MASK)
    code, _, output = imported(run, tmp_path / "in", tmp_path, "--labels", "seg", "--anonymise")
    assert code == 1
    assert "cannot be written without identity" in " ".join(output.split())
    assert [path for path in (tmp_path / "out/site_A").rglob("*") if path.is_file()] == []
