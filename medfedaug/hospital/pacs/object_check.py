"""Check the objects of an archive as they arrive: against its answer, the request, and other objects."""

import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pydicom
from pydicom import Dataset

from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom.checks import check_bounds, reading, require
from medfedaug.hospital.dicom.headers import items_of
from medfedaug.hospital.dicom.series import DicomSeries
from medfedaug.hospital.pacs.archive import ArchiveSeries, FetchError

OBJECT_TAGS = (
    *("PatientID", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID"),
    *("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel"),
)
"""Attributes of an object that `SeriesBounds` checks."""
_SERIES = ("RTReferencedStudySequence", "RTReferencedSeriesSequence")
MOST_BYTES = 2**33  # bytes of all objects of a series
MOST_VOXELS = 2**30  # values of all pixels of a series, by its headers


class ObjectRefused(ReaderError):
    """An object contradicts the archive's answer, so nothing of its series is used."""


def reading_objects(problem: str = "") -> AbstractContextManager[None]:
    """Turn any error into a `ReaderError` that quotes nothing of an object, which may name a patient.

    Without a named problem an `OSError` passes, which may come from a file that is written.
    """
    passing = () if problem else (OSError,)
    return reading(problem or "an object is damaged", *passing, reason=lambda error: type(error).__name__)


def read_values(source: Path | bytes, tags: Sequence[str] = OBJECT_TAGS) -> dict[str, str]:
    """Read the values of attributes of an object as text; empty for missing ones."""
    with reading_objects():
        check_bounds(source)
        file = source if isinstance(source, Path) else io.BytesIO(source)
        header = pydicom.dcmread(file, stop_before_pixels=True, force=True, specific_tags=[*tags])
        return {name: str(header.get(name) or "").strip() for name in tags}


class SeriesBounds:
    """Bounds on the objects of one series: its patient, study and series, and sizes."""

    def __init__(self, series: ArchiveSeries) -> None:
        self._series = series
        self._bytes = self._voxels = 0

    def check(self, values: Mapping[str, str], size: int) -> None:
        """Check one object, and count it."""
        series = self._series
        compared = [
            ("patient", values["PatientID"], series.patient),
            ("study", values["StudyInstanceUID"], series.study),
            ("series", values["SeriesInstanceUID"], series.uid),
        ]
        for word, value, expected in compared:
            if value != expected.strip():
                raise ObjectRefused(
                    f"an object belongs to another {word} than the archive's answer says; none is used, "
                    "and the archive's administrator can mend it"
                )
        self._bytes += size
        self._voxels += _voxels(values)
        if self._bytes > MOST_BYTES or self._voxels > MOST_VOXELS:
            raise ObjectRefused(
                f"its objects have more than {MOST_BYTES >> 30} GiB, or by their headers more than "
                f"{MOST_VOXELS >> 20} million voxels; choose another series"
            )


def _voxels(values: Mapping[str, str]) -> int:
    with reading_objects():
        rows, columns = (int(values[name] or 0) for name in ("Rows", "Columns"))
        frames, samples = (int(values[name] or 1) for name in ("NumberOfFrames", "SamplesPerPixel"))
    return rows * columns * max(1, frames) * max(1, samples)


def check_references(label: Dataset, image: DicomSeries) -> None:
    """Check that a SEG or an RTSTRUCT refers to the objects of its image, in its frame of reference."""
    frame = image.first.frame_of_reference
    apart = frame and any(uid not in ("", frame) for uid in _frames_of_reference(label, image.uid))
    require(not apart, "a label object lies in another frame of reference than its image")
    files = [file for folder in image.folders for file in folder.iterdir()]
    with reading_objects():
        read = partial(pydicom.dcmread, specific_tags=["SOPInstanceUID"], stop_before_pixels=True)
        instances = {str(read(file).SOPInstanceUID) for file in files}
    known = {*_instances(label, image.uid)} <= instances
    require(known, "a label object refers to objects that its image does not have")


def _frames_of_reference(label: Dataset, series: str) -> Iterator[str]:
    if label.get("Modality") != "RTSTRUCT":
        yield str(label.get("FrameOfReferenceUID") or "")
        return
    for frame in items_of(label, "ReferencedFrameOfReferenceSequence"):
        if any(item.get("SeriesInstanceUID") == series for item in items_of(frame, *_SERIES)):
            yield str(frame.get("FrameOfReferenceUID") or "")
    for region in items_of(label, "StructureSetROISequence"):
        yield str(region.get("ReferencedFrameOfReferenceUID") or "")


def referenced_series(label: Dataset) -> list[Dataset]:
    """Return the items by which a SEG or an RTSTRUCT refers to series."""
    frames = items_of(label, "ReferencedFrameOfReferenceSequence", *_SERIES)
    return [*items_of(label, "ReferencedSeriesSequence"), *frames]


def _instances(label: Dataset, series: str) -> Iterator[str]:
    for item in referenced_series(label):
        if item.get("SeriesInstanceUID") == series:
            for name in ("ReferencedInstanceSequence", "ContourImageSequence"):
                yield from (str(one.get("ReferencedSOPInstanceUID")) for one in items_of(item, name))


@dataclass(frozen=True)
class Failure:
    """Reason why an object is missing; after a ``passing`` failure another attempt may succeed."""

    reason: str = ""
    timed_out: bool = False
    passing: bool = True


class Arrival:
    """Expected objects of a series, and the folder to which they are written.

    Unrequested objects are refused; an object of another patient, study or series is refused with the whole
    series. Files of an earlier call are kept. A file's name is a digest of the object's UID, so that no
    archive can choose it. Several threads may use it.
    """

    def __init__(
        self,
        series: ArchiveSeries,
        folder: Path,
        uids: Sequence[str],
        on_instance: Callable[[], object] = lambda: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {uid: folder / f"{hashlib.sha256(uid.encode()).hexdigest()[:24]}.dcm" for uid in uids}
        self._received = {uid for uid, file in self._files.items() if file.is_file()}
        self._on_instance = on_instance
        self._lock = threading.Lock()
        self._bounds = SeriesBounds(series)
        self._refused: ObjectRefused | None = None
        for _ in self._received:
            self._on_instance()

    @property
    def missing(self) -> list[str]:
        """UIDs of the missing objects, sorted."""
        with self._lock:
            return sorted(self._files.keys() - self._received)

    def has(self, uid: str) -> bool:
        """Return whether an object has come."""
        with self._lock:
            return uid in self._received

    @property
    def is_refused(self) -> bool:
        """Return whether the whole series is refused."""
        return self._refused is not None

    def accept(self, content: bytes) -> bool:
        """Write an object, and return whether it was expected.

        A killed process leaves the whole file, or none of its name.
        """
        values = read_values(content)
        file = self._files.get(values["SOPInstanceUID"])
        with self._lock:
            if self._refused is not None:
                raise self._refused
            if file is None:
                return False
            try:
                self._bounds.check(values, len(content))
            except ObjectRefused as error:
                self._refused = error
                raise
            if values["SOPInstanceUID"] in self._received:
                return True
            unfinished = file.with_suffix(".part")
            unfinished.write_bytes(content)
            os.replace(unfinished, file)
            self._received.add(values["SOPInstanceUID"])
        self._on_instance()
        return True

    def files(self, failure: Failure) -> list[Path]:
        """Return the files, sorted."""
        if self._refused is not None:
            raise self._refused
        if missing := len(self.missing):
            reason = f" ({failure.reason})" if failure.reason else ""
            raise FetchError(
                f"{missing} of {len(self._files)} objects did not come{reason}", timed_out=failure.timed_out
            )
        return sorted(self._files.values())
