"""Structured report with the volumes of a label map (TID 1500), which refers to its DICOM SEG.

highdicom writes it, which is an extra: ``pip install 'medfedaug[pacs]'``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom

from medfedaug._version import __version__
from medfedaug.hospital.dicom.identity import ObjectKind
from medfedaug.hospital.dicom.segmentation import Segments, category, save_object, writing
from medfedaug.hospital.dicom.series import open_series


def write_report(
    path: Path, series: Path, voxels: np.ndarray, segmentation: Path, segments: Segments, comment: str = ""
) -> None:
    """Write a report (PS3.16, TID 1500): volume of each class, in millilitres, and a comment."""
    with writing("report", series, "Leave out --report."):
        seg = pydicom.dcmread(segmentation, stop_before_pixels=True)
        slices = [pydicom.dcmread(file, stop_before_pixels=True) for file in open_series(series).files]
        save_object(_report(series, voxels, seg, slices, segments, comment), slices[0], path)


def _report(
    series: Path,
    voxels: np.ndarray,
    seg: pydicom.Dataset,
    slices: Sequence[pydicom.Dataset],
    segments: Segments,
    more: str,
) -> Any:
    import highdicom as hd
    from pydicom.sr.codedict import codes

    volume = open_series(series)
    if volume.affine is None:
        raise ValueError("its slices do not say where they lie")
    millilitres = abs(float(np.linalg.det(volume.affine[:3, :3]))) / 1000
    model = segments.model
    device = hd.sr.ObserverContext(
        observer_type=codes.DCM.Device,
        observer_identifying_attributes=hd.sr.DeviceObserverIdentifyingAttributes(
            uid=model.device_uid(),
            name="medfedaug",
            manufacturer_name="medfedaug",
            model_name="medfedaug",
            serial_number=model.sha256,
        ),
    )
    counts = np.bincount(voxels.ravel(), minlength=len(segments.classes))
    groups = []
    for number, name in enumerate(segments.classes[1:], start=1):
        groups.append(
            hd.sr.VolumetricROIMeasurementsAndQualitativeEvaluations(
                tracking_identifier=hd.sr.TrackingIdentifier(
                    uid=model.tracking_uid(volume, number), identifier=name[:64]
                ),
                referenced_segment=hd.sr.ReferencedSegment(
                    sop_class_uid=seg.SOPClassUID,
                    sop_instance_uid=seg.SOPInstanceUID,
                    segment_number=number,
                    source_series=hd.sr.SourceSeriesForSegmentation(volume.uid),
                ),
                finding_category=category(),
                finding_type=segments.type_of(number),
                algorithm_id=hd.sr.AlgorithmIdentification(
                    name="medfedaug",
                    version=__version__,
                    parameters=[f"{key}: {value}" for key, value in model.parameters.items()],
                ),
                measurements=[
                    hd.sr.Measurement(
                        name=codes.SCT.Volume,
                        value=round(int(counts[number]) * millilitres, 3),
                        unit=hd.sr.CodedConcept("mL", "UCUM", "milliliter"),
                    )
                ],
            )
        )
    content = hd.sr.MeasurementReport(
        observation_context=hd.sr.ObservationContext(observer_device_context=device),
        procedure_reported=codes.SCT.ImagingProcedure,
        imaging_measurements=groups,
        title=codes.DCM.ImagingMeasurementReport,
    )
    warning = f"DO NOT RELY ON IT: {model.warning}" if model.warning else ""
    if text := ". ".join(filter(None, (warning, model.test, more))):
        comment = hd.sr.TextContentItem(
            name=codes.DCM.Comment, value=text, relationship_type=hd.sr.RelationshipTypeValues.CONTAINS
        )
        content[0].ContentSequence.insert(0, comment)
    return hd.sr.EnhancedSR(
        evidence=[seg, *slices],
        content=content[0],
        is_complete=True,
        is_final=False,
        is_verified=False,
        **model.of_series(volume, ObjectKind.REPORT),
    )
