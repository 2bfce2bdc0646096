"""Objects that inflate or nest without end are refused before they are parsed; all others are not."""

import io
import struct

import numpy as np
import pydicom
import pytest
from dicom_files import item, write_frames, write_slices
from pydicom.sequence import Sequence
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    RLELossless,
)
from written_volumes import load_volume

from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom import bounds as dicom_bounds
from medfedaug.hospital.dicom.bounds import check_bounds

VOXELS = np.random.default_rng(0).integers(-900, 900, (8, 6, 2)).astype(np.int16)
SYNTAXES = [
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    ExplicitVRBigEndian,
    DeflatedExplicitVRLittleEndian,
]


def content_of(dataset, syntax=None):
    if syntax is not None:
        dataset.file_meta.TransferSyntaxUID = syntax
    with io.BytesIO() as file:
        pydicom.dcmwrite(file, dataset, enforce_file_format=True, little_endian=syntax != ExplicitVRBigEndian)
        return file.getvalue()


def levels(count, *, private=False):
    """A dataset with so many sequences in each other."""
    dataset = item(PatientID="x")
    for _ in range(count):
        outer = pydicom.Dataset()
        outer.add_new(0x00111010 if private else 0x00081140, "SQ", Sequence([dataset]))
        dataset = outer
    return dataset


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_as_many_items_as_an_image_needs_are_taken(tmp_path, syntax):
    (file, *_) = write_slices(tmp_path, VOXELS)
    dataset = pydicom.dcmread(file)
    dataset.PixelData = dataset.PixelData  # of either order of bytes: it is not looked at
    dataset.ReferencedImageSequence = Sequence([levels(3) for _ in range(600)])
    content = content_of(dataset, syntax)
    check_bounds(content)
    (tmp_path / "one.dcm").write_bytes(content)
    check_bounds(tmp_path / "one.dcm")


def test_frames_and_encapsulated_pixels_are_taken(tmp_path):
    volumes = [np.zeros((4, 4, 300), np.int16)]
    path = write_frames(tmp_path / "frames.dcm", volumes, [(0, k) for k in range(300)])
    check_bounds(path)
    dataset = pydicom.dcmread(path)
    dataset.compress(RLELossless)
    check_bounds(content_of(dataset))


def test_items_without_types_in_an_object_with_them_are_taken(tmp_path):
    """As scanners write private sequences, and pydicom reads them."""
    (file, *_) = write_slices(tmp_path, VOXELS)
    content = file.read_bytes()
    comment = struct.pack("<HHI2s", 0x0010, 0x4000, 2, b"x ")
    items = struct.pack("<HHI", 0xFFFE, 0xE000, len(comment)) + comment
    creator = struct.pack("<HH2sH4s", 0x0019, 0x0010, b"LO", 4, b"TEST")
    sequence = struct.pack("<HH2sHI", 0x0019, 0x1001, b"SQ", 0, 600 * len(items)) + 600 * items
    place = content.index(b"\x20\0\x0d\0UI")
    content = content[:place] + creator + sequence + content[place:]
    assert len(pydicom.dcmread(io.BytesIO(content))[0x00191001].value) == 600
    check_bounds(content)
    deep = struct.pack("<HH2sHI", 0x0019, 0x1002, b"SQ", 0, 0xFFFFFFFF)
    deep += 200 * struct.pack("<HHIHHI", 0xFFFE, 0xE000, 0xFFFFFFFF, 0x0019, 0x1002, 0xFFFFFFFF)
    with pytest.raises(ReaderError, match="nested without end"):
        check_bounds(content[:place] + creator + sequence + deep)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_sequences_without_end_are_refused(tmp_path, syntax, private):
    (file, *_) = write_slices(tmp_path, VOXELS)
    dataset = pydicom.dcmread(file)
    dataset.update(levels(80, private=private))
    dataset.ReferencedPatientPhotoSequence = Sequence([item(PatientID="x") for _ in range(600)])
    with pytest.raises(ReaderError, match="nested without end"):
        check_bounds(content_of(dataset, syntax))


def test_the_reader_of_a_folder_names_such_a_file_and_reads_no_volume(tmp_path):
    *_, last = write_slices(tmp_path, VOXELS)
    dataset = pydicom.dcmread(last)
    dataset.update(levels(200))
    dataset.ReferencedPatientPhotoSequence = Sequence([item(PatientID="x") for _ in range(600)])
    last.write_bytes(content_of(dataset, ExplicitVRLittleEndian))
    with pytest.raises(ReaderError, match="nested without end"):
        load_volume(last)


def test_what_is_garbled_is_refused_where_it_could_hide_them(tmp_path):
    (file, *_) = write_slices(tmp_path, VOXELS)
    content = file.read_bytes()
    items = struct.pack("<HHI", 0xFFFE, 0xE000, 0) * 600
    sequence = struct.pack("<HH2sHIHHI", 0x0011, 0x1010, b"SQ", 0, 36, 0xFFFE, 0xE000, 28)
    beyond = struct.pack("<HH2sH", 0x0011, 0x1011, b"LT", len(items)) + items
    with pytest.raises(ReaderError, match="do not follow each other"):
        check_bounds(content + sequence + beyond + bytes(16))
    check_bounds(content[: len(content) // 2])  # few items: left to the parsers
    (tmp_path / "empty").touch()
    check_bounds(tmp_path / "empty")


def test_what_inflates_without_end_is_refused(tmp_path, monkeypatch):
    (file, *_) = write_slices(tmp_path, VOXELS)
    dataset = pydicom.dcmread(file)
    dataset.ImageComments = " " * 2**21
    content = content_of(dataset, DeflatedExplicitVRLittleEndian)
    check_bounds(content)
    monkeypatch.setattr(dicom_bounds, "MOST_INFLATED", 2**20)
    with pytest.raises(ReaderError, match="inflates to more than 1 MiB"):
        check_bounds(content)
    start = 144 + pydicom.dcmread(io.BytesIO(content)).file_meta.FileMetaInformationGroupLength
    with pytest.raises(ReaderError, match="cannot be inflated"):
        check_bounds(content[:start] + b"\xff" * 200)
