"""`LabelObject`: segments, authors and date of a DICOM SEG or RTSTRUCT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from pathlib import Path

import pydicom
from pydicom import Dataset

from medfedaug.hospital.dicom.headers import items_of
from medfedaug.hospital.dicom.identity import is_own_object
from medfedaug.hospital.dicom.segment_frames import described_segments
from medfedaug.hospital.pacs.archive import DATES
from medfedaug.hospital.pacs.object_check import reading_objects, referenced_series

_LARGE = "64 KB"  # larger values, such as pixels, are read on access
_DATES = (*DATES, ("SeriesDate", "SeriesTime"))


def class_of(name: str, segments: Mapping[str, str]) -> str | None:
    """Return the class of a segment, by the first pattern that its name matches, without regard to case.

    Example:
        >>> class_of("GTV 1", {"gtv*": "tumour"})
        'tumour'
    """
    bare = " ".join(name.split()).lower()
    return next((word for pattern, word in segments.items() if fnmatchcase(bare, pattern.lower())), None)


@dataclass(frozen=True)
class Segment:
    """Segment of a SEG, or region of an RTSTRUCT; a region without contours is ``empty``."""

    number: int
    name: str
    algorithm: str
    empty: bool = False

    @property
    def automatic(self) -> bool:
        """Return whether a program made it alone."""
        return self.algorithm == "AUTOMATIC"


@dataclass(frozen=True, eq=False)
class LabelObject:
    """Label object of a study, whose pixels are read on access.

    Args:
        segments: without regions of points, which enclose no voxel.
        date: date and time of its content, comparable as text; empty where it is missing or impossible.
        own: whether this software wrote it.
    """

    dataset: Dataset
    segments: tuple[Segment, ...]
    references: frozenset[str]
    date: str
    own: bool

    @classmethod
    def read(cls, file: Path) -> LabelObject:
        """Open an object."""
        with reading_objects("a label object is damaged"):
            dataset = pydicom.dcmread(file, defer_size=_LARGE)
            series = {str(item.get("SeriesInstanceUID", "")) for item in referenced_series(dataset)}
            segments = tuple(_segments(dataset))
            return cls(dataset, segments, frozenset(series - {""}), _date(dataset), is_own_object(dataset))

    @property
    def automatic(self) -> bool:
        """Return whether all of its segments are automatic."""
        return bool(self.segments) and all(segment.automatic for segment in self.segments)

    @property
    def uid(self) -> str:
        """SOPInstanceUID."""
        return str(self.dataset.get("SOPInstanceUID", ""))

    @property
    def series(self) -> str:
        """SeriesInstanceUID."""
        return str(self.dataset.get("SeriesInstanceUID", ""))


def _segments(dataset: Dataset) -> Sequence[Segment]:
    if dataset.get("Modality") != "RTSTRUCT":
        return [
            Segment(
                int(item.SegmentNumber),
                str(item.get("SegmentLabel", "")),
                str(item.get("SegmentAlgorithmType") or "").upper(),
            )
            for item in items_of(dataset, "SegmentSequence")
            if int(item.SegmentNumber) in described_segments(dataset)
        ]
    contour_types = {
        int(roi.ReferencedROINumber): {
            contour.get("ContourGeometricType") for contour in items_of(roi, "ContourSequence")
        }
        for roi in items_of(dataset, "ROIContourSequence")
    }
    return [
        Segment(
            int(roi.ROINumber),
            str(roi.get("ROIName", "")),
            str(roi.get("ROIGenerationAlgorithm") or "").upper(),
            empty=not contour_types.get(int(roi.ROINumber)),
        )
        for roi in items_of(dataset, "StructureSetROISequence")
        if contour_types.get(int(roi.ROINumber)) != {"POINT"}
    ]


def _date(dataset: Dataset) -> str:
    """Return the first date of an object; empty for an invalid day, or a future one."""
    for day, time in _DATES:
        if value := str(dataset.get(day) or "").strip():
            clock = str(dataset.get(time) or "").strip().replace(":", "")
            whole, _, fraction = clock.partition(".")
            if not all(part.isdecimal() for part in (whole, fraction) if part):
                return ""
            past = _past_day(value)
            return past and f"{past}{whole:0<6}.{fraction:0<6}"
    return ""


def _past_day(value: str) -> str:
    """Return a day as YYYYMMDD; empty for an invalid one, and for one that has begun nowhere on earth."""
    try:
        day = datetime.strptime(value.replace(".", ""), "%Y%m%d").replace(tzinfo=timezone.utc)
    except ValueError:
        return ""
    return f"{day:%Y%m%d}" if day <= datetime.now(timezone.utc) + timedelta(hours=14) else ""
