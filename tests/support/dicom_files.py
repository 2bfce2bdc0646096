"""DICOM files as scanners and archives write them, made by pydicom from an array and a geometry."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import (
    CTImageStorage,
    EnhancedMRImageStorage,
    ExplicitVRLittleEndian,
    SegmentationStorage,
    generate_uid,
)

EDGES = (0.9, 1.1, 3.0)
ORIGIN = np.array([-80.0, -90.0, -40.0])


def base(sop: str, study: str, series: str) -> Dataset:
    """A header with a patient, and nothing of an image."""
    header = Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header.SOPClassUID = header.file_meta.MediaStorageSOPClassUID = sop
    header.SOPInstanceUID = header.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    header.PatientID, header.PatientName = "PID-4711", "Doe^Jane"
    header.PatientBirthDate, header.PatientSex = "19500101", "F"
    header.StudyInstanceUID, header.SeriesInstanceUID = study, series
    header.StudyDate, header.StudyTime, header.StudyID = "20200101", "120000", "1"
    header.AccessionNumber, header.ReferringPhysicianName, header.Manufacturer = "", "", "scanner"
    header.FrameOfReferenceUID, header.PositionReferenceIndicator = f"{study[:60]}.9", ""
    header.SeriesNumber, header.Modality = 3, "CT"
    header.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    return header


def put_pixels(header: Dataset, stored: np.ndarray) -> None:
    """Grey values, int16, (rows, columns) or (frames, rows, columns)."""
    header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
    header.BitsAllocated = header.BitsStored = 16
    header.HighBit, header.PixelRepresentation = 15, 1
    header.Rows, header.Columns = stored.shape[-2:]
    header.PixelData = np.ascontiguousarray(stored.astype("<i2")).tobytes()


def write_slices(
    folder: Path,
    voxels: np.ndarray,
    *,
    turned: np.ndarray | None = None,
    edges: Sequence[float] = EDGES,
    shift: float = 0.0,
    study: str = "",
    series: str = "",
    sop: str = CTImageStorage,
    name: Callable[[Dataset, int], str] = lambda header, k: f"CT.{header.SOPInstanceUID}",
    syntax: str = ExplicitVRLittleEndian,
    change: Callable[[Dataset, int], Any] = lambda header, k: None,
    skip: Sequence[int] = (),
) -> list[Path]:
    """A series of one file a slice, in no order; those that ``change`` returns ``False`` for are not written.

    ``turned`` are the directions of columns, rows and slices in LPS, and ``shift`` moves each slice along its
    columns, mm, as a tilted gantry does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    turned = np.eye(3) if turned is None else turned
    study, series = study or generate_uid(), series or generate_uid()
    written = []
    for k in np.random.default_rng(0).permutation(voxels.shape[2]):
        if k in skip:
            continue
        header = base(sop, study, series)
        header.InstanceNumber = int(k) + 1
        position = ORIGIN + turned[:, 2] * edges[2] * k + turned[:, 1] * shift * k
        header.ImagePositionPatient = [f"{v:.6f}" for v in position]
        header.ImageOrientationPatient = [f"{v:.9f}" for v in (*turned[:, 0], *turned[:, 1])]
        header.PixelSpacing, header.SliceThickness = [edges[1], edges[0]], edges[2]
        header.RescaleSlope, header.RescaleIntercept = 1, 0
        put_pixels(header, voxels[:, :, k].T)
        if change(header, int(k)) is False:
            continue
        path = folder / name(header, int(k))
        if syntax != ExplicitVRLittleEndian:
            if syntax.is_compressed and syntax.is_encapsulated:
                header.compress(syntax)
            else:
                header.file_meta.TransferSyntaxUID = syntax
        header.save_as(path, enforce_file_format=True)
        written.append(path)
    return written


def write_frames(
    path: Path,
    volumes: Sequence[np.ndarray],
    order: Sequence[tuple[int, int]],
    *,
    edges: Sequence[float] = EDGES,
    rescale: Callable[[int, int], tuple[float, float]] = lambda volume, k: (1.0, 0.0),
    change: Callable[[Dataset], Any] = lambda header: None,
) -> Path:
    """An enhanced multi-frame MR object: frame by frame, slice ``k`` of a volume, whose echo time it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = base(EnhancedMRImageStorage, generate_uid(), generate_uid())
    header.Modality, header.InstanceNumber, header.NumberOfFrames = "MR", 1, len(order)
    put_pixels(header, np.stack([volumes[volume][:, :, k].T for volume, k in order]))
    shared = Dataset()
    shared.PlaneOrientationSequence = Items([item(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])])
    measures = item(PixelSpacing=[edges[1], edges[0]], SliceThickness=1.0)  # thinner than the step
    shared.PixelMeasuresSequence = Items([measures])
    header.SharedFunctionalGroupsSequence = Items([shared])
    groups = []
    for volume, k in order:
        slope, intercept = rescale(volume, k)
        group = Dataset()
        position = ORIGIN + np.array([0, 0, edges[2] * k])
        group.PlanePositionSequence = Items([item(ImagePositionPatient=position.tolist())])
        group.PixelValueTransformationSequence = Items(
            [item(RescaleSlope=slope, RescaleIntercept=intercept, RescaleType="US")]
        )
        group.FrameContentSequence = Items([item(StackID="1", InStackPositionNumber=k + 1)])
        group.MREchoSequence = Items([item(EffectiveEchoTime=10.0 * (volume + 1))])
        groups.append(group)
    header.PerFrameFunctionalGroupsSequence = Items(groups)
    change(header)
    header.save_as(path, enforce_file_format=True)
    return path


def item(**values: Any) -> Dataset:
    dataset = Dataset()
    for name, value in values.items():
        setattr(dataset, name, value)
    return dataset


def sets(**values: Any) -> Callable[..., None]:
    """A change of headers to values; functions are called with the number of the slice."""

    def change(header: Dataset, k: int = 0) -> None:
        for name, value in values.items():
            setattr(header, name, value(k) if callable(value) else value)

    return change


def write_object(path: Path, sop: str = SegmentationStorage, **values: Any) -> Path:
    """An object that is no image and has no slices; a SEG has frames of its own."""
    dataset = base(sop, values.pop("study", generate_uid()), generate_uid())
    for name, value in values.items():
        setattr(dataset, name, value)
    if sop == SegmentationStorage:
        put_pixels(dataset, np.zeros((2, 4, 4)))
        dataset.NumberOfFrames = 2
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def affine_of(headers: Sequence[Dataset]) -> np.ndarray:
    """The affine to RAS, by the standard's own arithmetic (PS3.3 C.7.6.2.1.1), of sorted headers."""
    first, last = headers[0], headers[-1]
    row, column = np.reshape([float(v) for v in first.ImageOrientationPatient], (2, 3))
    start, end = (np.array([float(v) for v in one.ImagePositionPatient]) for one in (first, last))
    lps = np.eye(4)
    lps[:3, 0], lps[:3, 1] = row * float(first.PixelSpacing[1]), column * float(first.PixelSpacing[0])
    lps[:3, 2], lps[:3, 3] = (end - start) / (len(headers) - 1), start
    return np.diag([-1, -1, 1, 1]) @ lps
