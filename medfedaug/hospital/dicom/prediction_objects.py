"""`DicomObjects`: identity and codes of a predicted SEG, its contours and its report."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from medfedaug.data.base import Case
from medfedaug.data.io.base import Segments as Classes
from medfedaug.data.io.formats import is_dicom
from medfedaug.data.io.label_maps import write_whole
from medfedaug.hospital.dicom.identity import ModelIdentity, ObjectKind
from medfedaug.hospital.dicom.object_identity import further_series, object_identity, read_codes
from medfedaug.hospital.dicom.segment_codes import SegmentCodes
from medfedaug.hospital.dicom.segmentation import Segments, check_highdicom
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.series_objects import SeriesObjects


class DicomObjects(SeriesObjects):
    """Writes contours and a report of the label map of a DICOM series, if the options ask for them."""

    def __post_init__(self) -> None:
        _ = self.codes  # read before any prediction

    @cached_property
    def codes(self) -> dict[str, SegmentCodes]:
        """The codes of the classes."""
        return read_codes(self.models.first, self.options.codes)

    def settings(self) -> dict[str, Any]:
        """Return codes and kinds of objects."""
        settings: dict[str, Any] = {}
        if self.codes:
            settings["codes"] = {name: asdict(codes) for name, codes in self.codes.items()}
        if kinds := object_kinds(self.options):
            settings["objects"] = [kind.word for kind in kinds]
        return settings

    def check(self, cases: Iterable[Case]) -> None:
        """Check that DICOM SEG can be written, if a case is a series."""
        if any(is_dicom(case.image) for case in cases):
            check_highdicom()

    def files(self, case: Case, label: str) -> list[str]:
        """Return the files of the objects of a series."""
        kinds = object_kinds(self.options) if is_dicom(case.image) else ()
        return [_object_file(label.removesuffix(".dcm"), kind) for kind in kinds]

    def segments(self, case: Case, classes: tuple[str, ...], notes: Mapping[str, str]) -> Segments:
        """Return the segments of a DICOM SEG."""
        return Segments(classes, self.identity(case), self.codes, notes)

    def identity(self, case: Case) -> ModelIdentity:
        """Return the identity of the objects of a case."""
        further = self.further.get(case.name) or further_series(case, self.folder.channel_names)
        return object_identity(self.models, self.origin, self.codes, self.again, further=further)

    def write(self, out: Path, case: Case, label: Tensor, file: str, segments: Classes) -> None:
        """Write the objects of a series.

        Raises:
            DataError: for a series that lacks what an object needs.
            StorageError: when a file cannot be written.
        """
        from medfedaug.hospital.dicom.rtstruct import write_rtstruct
        from medfedaug.hospital.dicom.structured_report import write_report

        assert isinstance(segments, Segments)
        voxels, image, model = label[0].numpy(), case.image, segments
        for kind, name in zip(object_kinds(self.options), self.files(case, file), strict=False):
            if kind is ObjectKind.RTSTRUCT:
                write_whole(out / name, lambda path: write_rtstruct(path, image, voxels, model))
            else:
                write_whole(out / name, lambda path: write_report(path, image, voxels, out / file, model))


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
