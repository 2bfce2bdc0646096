"""DICOM series to predict on."""

import numpy as np
import pydicom
import pytest
from written_volumes import itk_image, load_volume, write_dicom


def series(folder, voxels, affine, number: str):
    """A series as a scanner writes it: what SimpleITK leaves out is added."""
    write_dicom(folder, itk_image(voxels, affine), series=number)
    for file in folder.iterdir():
        slice_ = pydicom.dcmread(file)
        slice_.PatientID, slice_.PatientName = "P7", "Doe^Jane"
        slice_.PatientBirthDate, slice_.PatientSex = "19500101", "F"
        slice_.StudyDate, slice_.StudyTime, slice_.StudyID = "20200101", "120000", "1"
        slice_.AccessionNumber, slice_.ReferringPhysicianName, slice_.Manufacturer = "", "", "scanner"
        slice_.FrameOfReferenceUID, slice_.PositionReferenceIndicator = "1.2.7", ""
        slice_.SOPClassUID = slice_.file_meta.MediaStorageSOPClassUID = pydicom.uid.MRImageStorage
        slice_.save_as(file)
    return folder


@pytest.fixture(scope="module")
def voxels(phantom_dir):
    head = load_volume(next((phantom_dir / "site_C/images").glob("*.nii.gz"))).numpy()[0]
    low, high = head.min(), head.max()
    return np.rint((head - low) / (high - low) * 4000).astype(np.int16)
