"""DICOM SEG and RTSTRUCT as other programs write them, on the slices of `dicom_files.write_slices`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import highdicom as hd
import numpy as np
import pydicom
from dicom_files import base, item
from pydicom.pixels import pack_bits
from pydicom.sequence import Sequence as Items
from pydicom.sr.codedict import codes
from pydicom.uid import RTStructureSetStorage, generate_uid


def sorted_slices(files: Sequence[Path]) -> list[pydicom.Dataset]:
    return sorted(map(pydicom.dcmread, files), key=lambda one: one.InstanceNumber)


def write_segmentation(
    path: Path,
    files: Sequence[Path],
    masks: np.ndarray | Mapping[str, np.ndarray],
    kind: str = "BINARY",
    *,
    shuffled: bool = False,
    algorithm: str | Mapping[str, str] = "MANUAL",
    change: Callable[[pydicom.Dataset], object] = lambda dataset: None,
) -> Path:
    """A SEG by highdicom.

    Args:
        path: the file.
        files: slices of the image.
        masks: (X, Y, Z) of the only segment, or of each by its label.
        kind: ``BINARY``, ``FRACTIONAL`` or ``LABELMAP``.
        shuffled: whether its frames follow each other in no order.
        algorithm: type of the algorithm of all segments, or of each by its label.
        change: called with the object before it is written.
    """
    named = masks if isinstance(masks, Mapping) else {"Tumour core": masks}
    by_label = algorithm if isinstance(algorithm, Mapping) else dict.fromkeys(named, algorithm)
    maker = hd.AlgorithmIdentificationSequence("t", codes.DCM.ArtificialIntelligence, "1")
    described = [
        hd.seg.SegmentDescription(
            n,
            label,
            codes.SCT.Tissue,
            codes.SCT.Tissue,
            hd.seg.SegmentAlgorithmTypeValues[by_label[label]],
            None if by_label[label] == "MANUAL" else maker,
        )
        for n, label in enumerate(named, 1)
    ]
    pixels = np.stack([mask.transpose(2, 1, 0) for mask in named.values()], axis=-1)
    segmentation = hd.seg.Segmentation(
        sorted_slices(files), pixels, kind, described, hd.UID(), 9, hd.UID(), 1, "t", "t", "1", "t"
    )
    if shuffled:
        order = np.random.default_rng(1).permutation(segmentation.NumberOfFrames)
        stored = segmentation.pixel_array[order]
        segmentation.PixelData = pack_bits(stored) if kind == "BINARY" else stored.tobytes()
        groups = segmentation.PerFrameFunctionalGroupsSequence
        segmentation.PerFrameFunctionalGroupsSequence = Items([groups[n] for n in order])
    change(segmentation)
    path.parent.mkdir(parents=True, exist_ok=True)
    segmentation.save_as(path)
    return path


def write_rtstruct(
    path: Path,
    files: Sequence[Path],
    contours: Mapping[str, Sequence[tuple[int, Sequence]]],
    *,
    kind: str = "CLOSED_PLANAR",
    algorithm: str = "MANUAL",
    change: Callable[[pydicom.Dataset], object] = lambda dataset: None,
) -> Path:
    """An RTSTRUCT with contours in millimetres, by the headers of the slices alone.

    Args:
        path: the file.
        files: slices of the image.
        contours: of each region the slice and the points, (column, row) in voxels, of each contour.
        kind: geometric type of the contours.
        algorithm: by which the regions were generated.
        change: called with the object before it is written.
    """
    slices = sorted_slices(files)
    structures = base(RTStructureSetStorage, slices[0].StudyInstanceUID, generate_uid())
    structures.Modality, structures.PatientID = "RTSTRUCT", slices[0].PatientID
    series = item(SeriesInstanceUID=slices[0].SeriesInstanceUID)
    study = item(RTReferencedSeriesSequence=Items([series]))
    structures.ReferencedFrameOfReferenceSequence = Items([item(RTReferencedStudySequence=Items([study]))])
    numbered = [*enumerate(contours.items(), 1)]
    structures.StructureSetROISequence = Items(
        [item(ROINumber=n, ROIName=name, ROIGenerationAlgorithm=algorithm) for n, (name, _) in numbered]
    )
    structures.ROIContourSequence = Items([])
    for n, (_, own) in numbered:
        drawn = Items([_drawn(slices[k], points, kind) for k, points in own])
        structures.ROIContourSequence.append(item(ReferencedROINumber=n, ContourSequence=drawn))
    change(structures)
    path.parent.mkdir(parents=True, exist_ok=True)
    structures.save_as(path, enforce_file_format=True)
    return path


def _drawn(slice_: pydicom.Dataset, points: Sequence, kind: str) -> pydicom.Dataset:
    row, column = np.reshape(np.array(slice_.ImageOrientationPatient, float), (2, 3))
    where = np.array(points, float)
    place = np.array(slice_.ImagePositionPatient, float)
    place = place + where[:, :1] * row * float(slice_.PixelSpacing[1])
    place = place + where[:, 1:] * column * float(slice_.PixelSpacing[0])
    data = [f"{value:.6f}" for value in place.ravel()]
    return item(ContourGeometricType=kind, ContourData=data)
