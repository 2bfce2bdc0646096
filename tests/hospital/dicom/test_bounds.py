"""Objects that inflate or nest without end are refused in one line."""

import io

import numpy as np
import pydicom
import pytest
from dicom_files import write_slices
from pydicom.uid import DeflatedExplicitVRLittleEndian

from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom import checks as dicom_bounds
from medfedaug.hospital.dicom.checks import check_bounds
from medfedaug.hospital.dicom.headers import read_instance
from medfedaug.hospital.pacs.object_check import read_values

VOXELS = np.random.default_rng(0).integers(-900, 900, (8, 6, 2)).astype(np.int16)
SEQUENCE = b"\x08\0\x40\x11SQ\0\0\xff\xff\xff\xff\xfe\xff\0\xe0\xff\xff\xff\xff"


def test_sequences_without_end_are_refused(tmp_path):
    (file, *_) = write_slices(tmp_path, VOXELS)
    content = file.read_bytes()
    place = content.index(b"\x08\0\x60\0CS")  # Modality
    file.write_bytes(content[:place] + 20_000 * SEQUENCE)
    with pytest.raises(ReaderError):
        read_instance(file)
    with pytest.raises(ReaderError):
        read_values(file.read_bytes())


def test_what_inflates_without_end_is_refused(tmp_path, monkeypatch):
    (file, *_) = write_slices(tmp_path, VOXELS)
    dataset = pydicom.dcmread(file)
    dataset.ImageComments = " " * 2**21
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    with io.BytesIO() as written:
        pydicom.dcmwrite(written, dataset, enforce_file_format=True)
        content = written.getvalue()
    check_bounds(content)
    monkeypatch.setattr(dicom_bounds, "MOST_INFLATED", 2**20)
    with pytest.raises(ReaderError, match="inflates to more than 1 MiB"):
        check_bounds(content)
    start = 144 + pydicom.dcmread(io.BytesIO(content)).file_meta.FileMetaInformationGroupLength
    with pytest.raises(ReaderError, match="cannot be inflated"):
        check_bounds(content[:start] + b"\xff" * 200)
