"""RTSTRUCT: a label map as contours on the slices of its series, for planning systems that read no SEG.

highdicom makes its header, which is an extra: ``pip install 'medfedaug[pacs]'``.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pydicom
from pydicom import Dataset
from pydicom.uid import ExplicitVRLittleEndian, RTStructureSetStorage

from medfedaug.hospital.dicom.headers import DicomSlice, dataset_of
from medfedaug.hospital.dicom.identity import ObjectKind
from medfedaug.hospital.dicom.segmentation import Segments, colour, save_object, writing
from medfedaug.hospital.dicom.series import open_series
from medfedaug.hospital.dicom.volumes import DicomSeries

_STUDY_COMPONENT = "1.2.840.10008.3.1.2.3.1"  # the class by which a structure set refers to a study


def write_rtstruct(path: Path, series: Path, voxels: np.ndarray, segments: Segments) -> None:
    """Write a label map, (X, Y, Z), as an RTSTRUCT: a region for each class, contours slice by slice.

    Contours run half way between voxels, in millimetres of the patient; holes are keyholes
    (`closed_contours`). A class without voxels is a region without contours.
    """
    volume = open_series(series)
    with writing("RTSTRUCT", series, "Leave out --rtstruct."):
        source = pydicom.dcmread(volume.files[0], stop_before_pixels=True)
        save_object(_structure_set(volume, source, voxels, segments), source, path)


def _structure_set(volume: DicomSeries, source: Dataset, voxels: np.ndarray, segments: Segments) -> Dataset:
    import highdicom as hd

    structure = hd.SOPClass(
        study_instance_uid=source.StudyInstanceUID,
        sop_class_uid=RTStructureSetStorage,
        modality="RTSTRUCT",
        transfer_syntax_uid=ExplicitVRLittleEndian,
        **segments.model.of_series(volume, ObjectKind.RTSTRUCT),
    )
    structure.copy_patient_and_study_information(source)
    structure.OperatorsName = ""
    structure.FrameOfReferenceUID = source.FrameOfReferenceUID
    structure.PositionReferenceIndicator = source.get("PositionReferenceIndicator", "")
    structure.ApprovalStatus = "UNAPPROVED"
    structure.StructureSetLabel = "medfedaug"
    structure.StructureSetDescription = "Contours of a prediction by a model; not reviewed by a person"
    structure.StructureSetDate, structure.StructureSetTime = (
        structure.InstanceCreationDate,
        structure.InstanceCreationTime,
    )
    structure.ReferencedFrameOfReferenceSequence = [_frame_of_reference(volume, source)]
    structure.StructureSetROISequence, structure.ROIContourSequence, structure.RTROIObservationsSequence = (
        [],
        [],
        [],
    )
    for number, name in enumerate(segments.classes[1:], start=1):
        structure.StructureSetROISequence.append(
            dataset_of(
                ROINumber=number,
                ReferencedFrameOfReferenceUID=source.FrameOfReferenceUID,
                ROIName=name[:64],
                ROIGenerationAlgorithm="AUTOMATIC",
                ROIGenerationDescription=f"model {segments.model.sha256}"[:64],
                ROIDerivationAlgorithmIdentificationSequence=[*segments.model.algorithm()],
            )
        )
        region = dataset_of(ReferencedROINumber=number, ROIDisplayColor=[*colour(number)])
        if contours := [*_contours(volume, voxels == number)]:
            region.ContourSequence = contours
        structure.ROIContourSequence.append(region)
        structure.RTROIObservationsSequence.append(
            dataset_of(
                ObservationNumber=number,
                ReferencedROINumber=number,
                RTROIInterpretedType="",
                ROIInterpreter="",
                RTROIIdentificationCodeSequence=[segments.type_of(number)],
            )
        )
    return structure


def _frame_of_reference(volume: DicomSeries, source: Dataset) -> Dataset:
    first = {piece.file: piece for piece in reversed(volume.slices)}
    images = [_reference(source.SOPClassUID, first[file]) for file in volume.files]
    series = dataset_of(SeriesInstanceUID=volume.uid, ContourImageSequence=images)
    study = dataset_of(
        ReferencedSOPClassUID=_STUDY_COMPONENT,
        ReferencedSOPInstanceUID=source.StudyInstanceUID,
        RTReferencedSeriesSequence=[series],
    )
    return dataset_of(FrameOfReferenceUID=source.FrameOfReferenceUID, RTReferencedStudySequence=[study])


def _contours(volume: DicomSeries, mask: np.ndarray) -> Iterator[Dataset]:
    to_patient = np.diag([-1.0, -1, 1, 1]) @ volume.stated_affine
    for k in np.flatnonzero(mask.any(axis=(0, 1))):
        piece = volume.slices[k]
        reference = _reference(volume.first.sop_class, piece, frame=volume.first.frames > 1)
        for ring in closed_contours(mask[..., k]):
            voxel = np.column_stack([ring, np.full(len(ring), k), np.ones(len(ring))])
            points = (voxel @ to_patient.T)[:, :3]
            yield dataset_of(
                ContourImageSequence=[reference],
                ContourGeometricType="CLOSED_PLANAR",
                NumberOfContourPoints=len(points),
                ContourData=[f"{value:.4f}" for value in points.ravel()],  # 0.1 µm
            )


def _reference(sop_class: str, piece: DicomSlice, *, frame: bool = False) -> Dataset:
    reference = dataset_of(ReferencedSOPClassUID=sop_class, ReferencedSOPInstanceUID=piece.instance)
    if frame:
        reference.ReferencedFrameNumber = piece.frame + 1
    return reference


def closed_contours(mask: np.ndarray) -> list[np.ndarray]:
    """Draw the contours of a mask half way between voxels.

    DICOM's RTSTRUCT has no holes: a hole is joined to the ring around it by a channel without width, the
    keyhole technique (PS3.3, C.8.8.6.3). Rings are (N, 2) in voxel indices; their last point is joined to the
    first. A ring contains a voxel if it contains its centre.

    Example:
        >>> closed_contours(np.eye(1))[0].tolist()
        [[-0.5, 0.0], [0.0, -0.5], [0.5, 0.0], [0.0, 0.5]]
    """
    import contourpy

    padded = np.pad(mask.astype(float), 1).T  # closes contours at the border; rows are y
    drawn = contourpy.contour_generator(z=padded, fill_type=contourpy.FillType.OuterOffset).filled(0.5, 2.0)
    rings = []
    for points, offsets in zip(*drawn, strict=True):
        # The last point of each ring is the first once more.
        outer, *holes = (points[a : b - 1] - 1 for a, b in pairwise(offsets))
        # In this order, the ring left of a hole is the outer ring or a hole already joined to it.
        for hole in sorted(holes, key=lambda ring: float(ring[:, 0].min())):
            outer = _joined(outer, hole)
        rings.append(outer)
    return rings


def _joined(ring: np.ndarray, hole: np.ndarray) -> np.ndarray:
    """Join a hole to the ring around it, by a channel from its leftmost point to the left."""
    first = int(hole[:, 0].argmin())
    x, y = hole[first]
    ends = np.roll(ring, -1, axis=0)
    low, high = np.minimum(ring[:, 1], ends[:, 1]), np.maximum(ring[:, 1], ends[:, 1])
    crossing = np.flatnonzero((low <= y) & (y <= high) & (low < high))
    share = (y - ring[crossing, 1]) / (ends[crossing, 1] - ring[crossing, 1])
    crossing_x = ring[crossing, 0] + share * (ends[crossing, 0] - ring[crossing, 0])
    left = np.flatnonzero(crossing_x < x)
    nearest = left[crossing_x[left].argmax()]
    edge, gate = int(crossing[nearest]), np.array([[crossing_x[nearest], y]])
    loop = np.concatenate([np.roll(hole, -first, axis=0), hole[first : first + 1]])
    return np.concatenate([ring[: edge + 1], gate, loop, gate, ring[edge + 1 :]])
