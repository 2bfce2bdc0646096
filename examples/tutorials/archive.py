"""An archive for the tutorial on a PACS, and studies in it: what a hospital has already."""

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

import highdicom as hd
import nibabel
import numpy as np
import pydicom
import requests
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sr.codedict import codes
from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage, generate_uid

__all__ = ["find_orthanc", "start_archive", "store_study"]

_PLUGINS = (Path("/usr/share/orthanc/plugins"), Path("/usr/lib/orthanc"))


def find_orthanc() -> tuple[str, str] | None:
    """Orthanc and its plugin for DICOMweb, as Debian installs them; ``None`` where one is missing."""
    program = shutil.which("Orthanc", path="/usr/sbin:/usr/bin:/usr/local/bin")
    plugins = [file for folder in _PLUGINS for file in folder.glob("libOrthancDicomWeb.so*")]
    return (program, str(plugins[0])) if program and plugins else None


def start_archive(folder: Path) -> str:
    """Start Orthanc on this machine alone, and return the URL of its DICOMweb service."""
    found = find_orthanc()
    assert found is not None, "apt-get install orthanc orthanc-dicomweb"
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        http, dicom = one.getsockname()[1], other.getsockname()[1]
    folder.mkdir()
    settings = {
        "StorageDirectory": str(folder / "storage"),
        "IndexDirectory": str(folder / "index"),
        "Plugins": [found[1]],
        "HttpPort": http,
        "DicomPort": dicom,
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": False,
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }
    (folder / "orthanc.json").write_text(json.dumps(settings))
    with (folder / "log").open("w") as log:
        subprocess.Popen([found[0], folder / "orthanc.json"], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{http}/dicom-web"
    for _ in range(600):
        try:
            requests.get(f"{url}/studies?limit=1", timeout=5)
            return url
        except requests.RequestException:
            time.sleep(0.1)
    raise RuntimeError((folder / "log").read_text())


def store_study(url: str, image: Path, label: Path, patient: str, accession: str) -> None:
    """Store an MR series and a DICOM SEG that a reader drew on it, made of two NIfTI files."""
    slices = _series(image, patient, accession)
    masks = np.asarray(nibabel.load(label).dataobj).astype(np.uint8).transpose(2, 1, 0)
    lesion = hd.seg.SegmentDescription(
        segment_number=1,
        segment_label="Lesion",
        segmented_property_category=codes.SCT.MorphologicallyAbnormalStructure,
        segmented_property_type=codes.SCT.Lesion,
        algorithm_type=hd.seg.SegmentAlgorithmTypeValues.MANUAL,
    )
    drawn = hd.seg.Segmentation(
        source_images=slices,
        pixel_array=masks,
        segmentation_type="BINARY",
        segment_descriptions=[lesion],
        series_instance_uid=hd.UID(),
        series_number=100,
        sop_instance_uid=hd.UID(),
        instance_number=1,
        manufacturer="reader",
        manufacturer_model_name="reader",
        software_versions="1",
        device_serial_number="1",
    )
    for dataset in (*slices, drawn):
        with pydicom.filebase.DicomBytesIO() as file:
            pydicom.dcmwrite(file, dataset, enforce_file_format=True)
            content = file.getvalue()
        url_of_orthanc = url.removesuffix("/dicom-web")
        requests.post(f"{url_of_orthanc}/instances", data=content, timeout=60).raise_for_status()


def _series(image: Path, patient: str, accession: str) -> list[Dataset]:
    volume = nibabel.load(image)
    voxels = np.asarray(volume.dataobj, dtype=float)
    low, high = voxels.min(), voxels.max()
    stored = np.rint((voxels - low) / (high - low) * 4000).astype("<u2")
    lps = np.diag([-1.0, -1, 1, 1]) @ volume.affine
    edges = np.linalg.norm(lps[:3, :3], axis=0)
    study, series, frame = generate_uid(), generate_uid(), generate_uid()
    slices = []
    for k in range(voxels.shape[2]):
        one = Dataset()
        one.file_meta = FileMetaDataset()
        one.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        one.SOPClassUID = one.file_meta.MediaStorageSOPClassUID = MRImageStorage
        one.SOPInstanceUID = one.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        one.StudyInstanceUID, one.SeriesInstanceUID, one.FrameOfReferenceUID = study, series, frame
        one.PatientID, one.PatientName, one.AccessionNumber = patient, f"{patient}^Test", accession
        one.PatientBirthDate, one.PatientSex, one.StudyID = "", "", "1"
        one.StudyDate, one.StudyTime, one.ReferringPhysicianName = "20260105", "080000", ""
        one.Modality, one.SeriesNumber, one.SeriesDescription = "MR", 3, "FLAIR ax"
        one.Manufacturer, one.PositionReferenceIndicator, one.InstanceNumber = "phantom", "", k + 1
        one.ImageType, one.SliceThickness = ["ORIGINAL", "PRIMARY"], float(edges[2])
        one.ImagePositionPatient = [round(float(v), 6) for v in lps[:3, :3] @ (0, 0, k) + lps[:3, 3]]
        directions = (*(lps[:3, 0] / edges[0]), *(lps[:3, 1] / edges[1]))
        one.ImageOrientationPatient = [round(float(v), 9) for v in directions]
        one.PixelSpacing = [float(edges[1]), float(edges[0])]
        one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
        one.BitsAllocated = one.BitsStored = 16
        one.HighBit, one.PixelRepresentation = 15, 0
        one.Rows, one.Columns = voxels.shape[1], voxels.shape[0]
        one.PixelData = np.ascontiguousarray(stored[:, :, k].T).tobytes()
        slices.append(one)
    return slices
