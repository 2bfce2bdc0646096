"""`LabelObject`: a DICOM SEG or RTSTRUCT as an import sees it: segments, their makers, and its date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from pathlib import Path

import pydicom
from pydicom import Dataset

from medfedaug.data.io.dicom_headers import items_of
from medfedaug.data.io.dicom_identity import is_own_object
from medfedaug.data.io.segment_frames import described_segments
from medfedaug.data.pacs.archive import DATES
from medfedaug.data.pacs.object_check import reading_objects, referenced_series

_LARGE = "64 KB"  # values that are read when they are needed: pixels

_DATES = (*DATES, ("SeriesDate", "SeriesTime"))


def class_of(name: str, segments: Mapping[str, str]) -> str | None:
    """Return the class of a segment, by the first pattern that its name fits, without minding capitals.

    Example:
        >>> class_of("GTV 1", {"gtv*": "tumour"})
        'tumour'
    """
    bare = " ".join(name.split()).lower()
    return next((found for pattern, found in segments.items() if fnmatchcase(bare, pattern.lower())), None)


@dataclass(frozen=True)
class Segment:
    """Segment of a SEG, or region of an RTSTRUCT.

    Args:
        algorithm: ``AUTOMATIC``, ``SEMIAUTOMATIC`` or ``MANUAL``; empty where the object does not say.
        empty: whether it is a region without contours.
    """

    number: int
    name: str
    algorithm: str
    empty: bool = False

    @property
    def automatic(self) -> bool:
        """Return whether no person had a hand in it."""
        return self.algorithm == "AUTOMATIC"


@dataclass(frozen=True, eq=False)
class LabelObject:
    """Label object of a study.

    Args:
        dataset: the object; its pixels are read when they are needed.
        segments: without regions that are points, which enclose no voxel.
        date: date and time of its content, comparable as text; empty where it does not say, and
            where nothing was made then.
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
        """Return whether all of its segments are."""
        return bool(self.segments) and all(one.automatic for one in self.segments)

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
                int(one.SegmentNumber),
                str(one.get("SegmentLabel", "")),
                str(one.get("SegmentAlgorithmType") or "").upper(),
            )
            for one in items_of(dataset, "SegmentSequence")
            if int(one.SegmentNumber) in described_segments(dataset)
        ]
    drawn = {
        int(roi.ReferencedROINumber): {
            one.get("ContourGeometricType") for one in items_of(roi, "ContourSequence")
        }
        for roi in items_of(dataset, "ROIContourSequence")
    }
    return [
        Segment(
            int(one.ROINumber),
            str(one.get("ROIName", "")),
            str(one.get("ROIGenerationAlgorithm") or "").upper(),
            empty=not drawn.get(int(one.ROINumber)),
        )
        for one in items_of(dataset, "StructureSetROISequence")
        if drawn.get(int(one.ROINumber)) != {"POINT"}
    ]


def _date(dataset: Dataset) -> str:
    """The first date of an object, of those that it may have; none where it is no day, or one to come."""
    for day, time in _DATES:
        if value := str(dataset.get(day) or "").strip():
            clock = str(dataset.get(time) or "").strip().replace(":", "")
            whole, _, fraction = clock.partition(".")
            if not all(part.isdecimal() for part in (whole, fraction) if part):
                return ""
            found = _past_day(value)
            return found and f"{found}{whole:0<6}.{fraction:0<6}"
    return ""


def _past_day(value: str) -> str:
    """A day as YYYYMMDD; empty for what is none, and for one that has begun nowhere on earth."""
    try:
        day = datetime.strptime(value.replace(".", ""), "%Y%m%d").replace(tzinfo=timezone.utc)
    except ValueError:
        return ""
    return f"{day:%Y%m%d}" if day <= datetime.now(timezone.utc) + timedelta(hours=14) else ""
