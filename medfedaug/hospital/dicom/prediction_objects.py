"""`DicomObjects`: identity of a predicted SEG, its contours, and its report of volumes.

highdicom writes the report, which is an extra: ``pip install 'medfedaug[pacs]'``.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from torch import Tensor

from medfedaug._version import __version__
from medfedaug.data.base import Case, plain_name
from medfedaug.data.io.base import Segments as Classes
from medfedaug.data.io.formats import is_dicom, write_whole
from medfedaug.hospital.dicom.identity import ModelIdentity, ObjectKind
from medfedaug.hospital.dicom.segmentation import Segments, category, save_object, writing
from medfedaug.hospital.dicom.series import open_series
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.runs.model_score import ModelScore
from medfedaug.runs.prediction.case_writer import SeriesObjects
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.utils.plugins import import_extra


class DicomObjects(SeriesObjects):
    """Writes contours and a report of the label map of a DICOM series, if the options ask for them."""

    def settings(self) -> dict[str, Any]:
        """Return kinds of objects."""
        kinds = object_kinds(self.options)
        return {"objects": [kind.word for kind in kinds]} if kinds else {}

    def check(self, cases: Iterable[Case]) -> None:
        """Check that DICOM SEG can be written, if a case is a series."""
        if any(is_dicom(case.image) for case in cases):
            import_extra("highdicom", "dicom", "a DICOM SEG of a series")

    def files(self, case: Case, label: str) -> list[str]:
        """Return the files of the objects of a series."""
        kinds = object_kinds(self.options) if is_dicom(case.image) else ()
        return [_object_file(label.removesuffix(".dcm"), kind) for kind in kinds]

    def segments(
        self, case: Case, classes: tuple[str, ...], notes: Mapping[str, str], controlled: str = ""
    ) -> Segments:
        """Return the segments of a DICOM SEG; ``controlled`` names the structure of a controlled map."""
        identity = self.identity(case)
        if not controlled:
            return Segments(classes, identity, notes)
        settings = hashlib.sha256(f"{identity.settings} {controlled}".encode()).hexdigest()
        return Segments(classes, replace(identity, settings=settings), notes, ObjectKind.CONTROLLED)

    def identity(self, case: Case) -> ModelIdentity:
        """Return the identity of the objects of a case."""
        further = self.further.get(case.name) or further_series(case, self.folder.channel_names)
        return object_identity(self.run, self.origin, further=further, calibration=self.calibration)

    def write(
        self, out: Path, case: Case, label: Tensor, file: str, segments: Classes, comment: str = ""
    ) -> None:
        """Write the objects of a series.

        Raises:
            DataError: for a series that lacks what an object needs.
            StorageError: when a file cannot be written.
        """
        from medfedaug.hospital.dicom.rtstruct import write_rtstruct

        assert isinstance(segments, Segments)
        voxels, image, model = label[0].numpy(), case.image, segments
        for kind, name in zip(object_kinds(self.options), self.files(case, file), strict=False):
            if kind is ObjectKind.RTSTRUCT:
                write_whole(out / name, lambda path: write_rtstruct(path, image, voxels, model))
            else:
                write_whole(
                    out / name, lambda path: write_report(path, image, voxels, out / file, model, comment)
                )


def channel_keys(names: Sequence[str], count: int) -> list[str]:
    """Return a key for each of several series: its channel's name where all have a name, else its number."""
    return [*map(plain_name, names)] if len(names) == count else [*map(str, range(count))]


def further_series(case: Case, names: Sequence[str]) -> dict[str, str]:
    """Return the SeriesInstanceUIDs of an image's DICOM series after the first, by `channel_keys`."""
    keyed = zip(channel_keys(names, len(case.files)), case.files, strict=True)
    return {key: open_series(file).uid for key, file in [*keyed][1:] if is_dicom(file)}


def object_identity(
    run: FinishedRun, origin: Origin, *, further: Mapping[str, str] | None = None, calibration: str = ""
) -> ModelIdentity:
    """Return the identity of a case's objects, which depends on settings and further series.

    A site's pair follows from model and site, and a pair of the images themselves does not count. ``further``
    has the SeriesInstanceUIDs of the image's series after the first, by channel; ``calibration`` is the hash
    of an applied calibration.
    """
    chosen: dict[str, Any] = {"calibration": calibration} if calibration else {}
    if origin.pair is not None and not origin.site:
        chosen["statistics"] = [origin.pair.mean.tolist(), origin.pair.std.tolist()]
    if further:
        chosen["series"] = dict(further)
    text = json.dumps(chosen, sort_keys=True).encode()
    tested = ModelScore.of(run.record, origin.site)
    return ModelIdentity(
        run.sha256,
        origin.site,
        settings=hashlib.sha256(text).hexdigest() if chosen else "",
        test=tested.score,
        warning=tested.warning,
    )


def object_files(out: Path, case: str) -> dict[ObjectKind, Path]:
    """Return the files of the DICOM objects of a case, by kind, whether or not they exist."""
    objects = {kind: out / _object_file(case, kind) for kind in (ObjectKind.RTSTRUCT, ObjectKind.REPORT)}
    return {ObjectKind.SEGMENTATION: out / f"{case}.dcm", **objects}


def object_kinds(options: PredictionOptions) -> list[ObjectKind]:
    """Return the kinds of DICOM objects in addition to the SEG of a DICOM series."""
    kinds = {ObjectKind.RTSTRUCT: options.rtstruct, ObjectKind.REPORT: options.report}
    return [kind for kind, written in kinds.items() if written]


def _object_file(name: str, kind: ObjectKind) -> str:
    return f"{name}.{kind.word}.dcm"


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
    millilitres = abs(float(np.linalg.det(volume.stated_affine[:3, :3]))) / 1000
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
