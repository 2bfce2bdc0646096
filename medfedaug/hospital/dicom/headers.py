"""Read headers of DICOM files, once and without the voxels: `DicomInstance` and its `DicomSlice`s."""

import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.uid import UID, ImplicitVRLittleEndian

from medfedaug.data.io.base import problem_of_edges
from medfedaug.errors import ReaderError, translated
from medfedaug.hospital.dicom.checks import PixelFormat, check_bounds, reading, require

_LARGEST_SCALE = 1e10  # factors of intensities beyond it, or below its inverse, are no scanner's

# Attributes that distinguish the volumes of one series, in the order in which they are tried, and their text.
VOLUME_TAGS = (
    ("EchoTime", "echo time {} ms"),
    ("EchoNumbers", "echo {}"),
    ("DiffusionBValue", "b-value {}"),
    ("InversionTime", "inversion time {} ms"),
    ("ImageType", "image type {}"),
    ("ComplexImageComponent", "{}"),
    ("TemporalPositionIdentifier", "phase {}"),
    ("TriggerTime", "trigger time {} ms"),
    ("FrameReferenceTime", "frame at {} ms"),
    ("KVP", "{} kV"),
    ("ConvolutionKernel", "kernel {}"),
    ("StackID", "stack {}"),
    ("AcquisitionNumber", "acquisition {}"),
    ("AcquisitionTime", "acquired at {}"),
    ("ContentTime", "made at {}"),
)
# Their places in the functional groups of a frame: the sequence, the attribute in it, and its name above.
_FRAME_TAGS = (
    ("MREchoSequence", "EffectiveEchoTime", "EchoTime"),
    ("MRDiffusionSequence", "DiffusionBValue", "DiffusionBValue"),
    ("MRModifierSequence", "InversionTimes", "InversionTime"),
    ("MRImageFrameTypeSequence", "FrameType", "ImageType"),
    ("MRImageFrameTypeSequence", "ComplexImageComponent", "ComplexImageComponent"),
    ("CTImageFrameTypeSequence", "FrameType", "ImageType"),
    ("FrameContentSequence", "TemporalPositionIndex", "TemporalPositionIdentifier"),
    ("FrameContentSequence", "StackID", "StackID"),
    ("FrameContentSequence", "FrameAcquisitionNumber", "AcquisitionNumber"),
    ("CardiacSynchronizationSequence", "NominalCardiacTriggerDelayTime", "TriggerTime"),
    ("CTXRayDetailsSequence", "KVP", "KVP"),
    ("CTReconstructionSequence", "ConvolutionKernel", "ConvolutionKernel"),
    ("UnassignedPerFrameConvertedAttributesSequence", "EchoTime", "EchoTime"),
    ("UnassignedPerFrameConvertedAttributesSequence", "TriggerTime", "TriggerTime"),
    ("UnassignedPerFrameConvertedAttributesSequence", "AcquisitionNumber", "AcquisitionNumber"),
)
# Numbers of the geometry and the intensity scale of a slice: how many each attribute has.
_NUMBERS = {
    "ImagePositionPatient": 3,
    "ImageOrientationPatient": 6,
    "PixelSpacing": 2,
    "SliceThickness": 1,
    "SpacingBetweenSlices": 1,
    "RescaleSlope": 1,
    "RescaleIntercept": 1,
}
_TAGS = [
    *("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "SeriesNumber", "Modality"),
    *("SeriesDescription", "ProtocolName", "InstanceNumber", "NumberOfFrames", "Rows", "Columns"),
    *("SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit"),
    *("PixelRepresentation", "PatientID", "IssuerOfPatientID", "BurnedInAnnotation", "FrameOfReferenceUID"),
    *("RescaleType", "Units"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "DirectoryRecordSequence"),
    *_NUMBERS,
    *(name for name, _ in VOLUME_TAGS),
]
# Objects that are no image of a patient, although some hold pixels.
_NO_IMAGES = {
    "1.2.840.10008.5.1.4.1.1.66.4": "DICOM SEG",
    "1.2.840.10008.5.1.4.1.1.66.7": "DICOM SEG",
    "1.2.840.10008.5.1.4.1.1.481.2": "RTDOSE",
    "1.2.840.10008.5.1.4.1.1.481.3": "RTSTRUCT",
    "1.2.840.10008.5.1.4.1.1.481.5": "RTPLAN",
    "1.2.840.10008.5.1.4.1.1.30": "parametric map",
    "1.2.840.10008.1.3.10": "DICOMDIR",
}
_UNIT = re.compile(r"[A-Z0-9]{1,16}")  # a defined term, and nothing that a person typed
SECONDARY_CAPTURES = {f"1.2.840.10008.5.1.4.1.1.7{part}" for part in ("", ".1", ".2", ".3", ".4")}


@dataclass(frozen=True)
class DicomSlice:
    """Slice of a series: a file, or one of its frames; ``None`` is what the file does not say."""

    file: Path
    frame: int
    instance: str  # SOPInstanceUID of the file
    number: int | None
    columns: int
    rows: int
    channels: int
    position: tuple[float, ...] | None  # centre of the first voxel, mm in LPS
    orientation: tuple[float, ...] | None  # directions of rows and columns in LPS, six numbers
    spacing: tuple[float, ...] | None  # between rows and between columns, mm
    thickness: float | None  # or the distance to the next slice, mm
    rescale: tuple[float, float]  # slope and intercept
    tags: dict[str, str]  # values of `VOLUME_TAGS`
    pixels: str = ""  # text of the `PixelFormat`, which the slices of one volume share
    problem: str = ""  # fault of the header


@dataclass(frozen=True)
class DicomInstance:
    """Header of one file, without anything that names a patient."""

    path: Path
    study: str
    series: str
    number: str
    description: str
    modality: str
    sop_class: str
    syntax: str
    image_type: tuple[str, ...]
    photometric: str
    frames: int
    slices: tuple[DicomSlice, ...]  # one for each frame; none where the object is not an image
    burned_in: bool = False  # the header says that the pixels hold text
    frame_of_reference: str = ""  # FrameOfReferenceUID: within one, positions are comparable
    units: str = ""  # DICOM's Units of PET, or RescaleType, where the header states one
    person: int = 0  # hash of PatientID and its issuer, valid only in this process

    @property
    def inverted(self) -> bool:
        """Return whether its values are inverted when they are read: white is lowest, without a unit."""
        return self.photometric == "MONOCHROME1" and not self.units

    @property
    def no_image(self) -> str:
        """Name of the kind of an object that is not an image; empty for an image."""
        if self.slices:
            return ""
        name = UID(self.sop_class).name if self.sop_class else "object without a class"
        return _NO_IMAGES.get(self.sop_class, name.removesuffix(" Storage"))


def is_dicom_file(path: Path) -> bool:
    """Return whether a file begins like a DICOM file, under any name."""
    with suppress(OSError, ValueError):
        status = path.stat()
        return stat.S_ISREG(status.st_mode) and _begins_as_dicom(path, status.st_mtime_ns, status.st_size)
    return False


@lru_cache(maxsize=2**14)
def _begins_as_dicom(path: Path, modified: int, size: int) -> bool:
    with path.open("rb") as file:
        begin = file.read(132)
    # Files from before the preamble begin with an element of group 8, in either byte order.
    little = begin[:2] in (b"\x02\x00", b"\x08\x00") and begin[3:4] == b"\x00"
    return begin[128:] == b"DICM" or little or begin[:3] == b"\x00\x08\x00"


def read_instance(path: Path) -> DicomInstance:
    """Read the header of a file, once for each version of the file."""
    with translated(OSError, to=lambda error: ReaderError(f"cannot be opened ({error.strerror or error})")):
        status = path.stat()
        version = path, status.st_mtime_ns, status.st_size
        require(stat.S_ISREG(status.st_mode) and _begins_as_dicom(*version), "no DICOM file")
        return _read_instance(*version)


@lru_cache(maxsize=2**15)
def _read_instance(path: Path, modified: int, size: int) -> DicomInstance:
    check_bounds(path)  # first: nested sequences crash parsers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that break the standard
        with reading("a damaged DICOM file", OSError):
            header = pydicom.dcmread(path, stop_before_pixels=True, force=True, specific_tags=_TAGS)
            return _instance(path, header)


def _instance(path: Path, header: pydicom.Dataset) -> DicomInstance:
    meta = header.file_meta
    sop_class = str(header.get("SOPClassUID", "")) or str(meta.get("MediaStorageSOPClassUID", ""))
    frames = int(header.get("NumberOfFrames") or 1)
    image = sop_class not in _NO_IMAGES and header.get("Rows") and header.get("Columns")
    return DicomInstance(
        path=path,
        study=str(header.get("StudyInstanceUID", "")),
        series=str(header.get("SeriesInstanceUID", "")),
        number=one_line(header.get("SeriesNumber")),
        description=one_line(header.get("SeriesDescription") or header.get("ProtocolName")),
        modality=one_line(header.get("Modality")),
        sop_class=sop_class,
        syntax=str(meta.get("TransferSyntaxUID") or ImplicitVRLittleEndian),
        image_type=tuple(map(str, values_of(header.get("ImageType")))),
        photometric=str(header.get("PhotometricInterpretation", "")),
        frames=frames,
        slices=tuple(_slices(path, header, frames)) if image else (),
        burned_in=str(header.get("BurnedInAnnotation", "")).strip().upper() == "YES",
        frame_of_reference=str(header.get("FrameOfReferenceUID", "")),
        units=units_of(header),
        person=hash((str(header.get("PatientID", "")), str(header.get("IssuerOfPatientID", "")))),
    )


def units_of(header: pydicom.Dataset) -> str:
    """Return the unit of an image's values: a defined term, or ``HU`` for CT; empty where none is stated.

    MONOCHROME1 is an instruction for a display. It must not change values in units.
    """
    default = {"CT": "HU"}.get(str(header.get("Modality")), "")
    stated = (str(header.get(name) or "").strip() for name in ("Units", "RescaleType"))
    return next((term for term in stated if _UNIT.fullmatch(term) and term != "US"), default)


def _slices(path: Path, header: pydicom.Dataset, frames: int) -> Iterator[DicomSlice]:
    number = header.get("InstanceNumber")
    pixels, problem = _pixels(header)
    common = DicomSlice(
        file=path,
        frame=0,
        instance=str(header.get("SOPInstanceUID", "")),
        number=int(number) if number is not None else None,
        columns=int(header.Columns),
        rows=int(header.Rows),
        channels=int(header.get("SamplesPerPixel") or 1),
        position=_numbers(header.get("ImagePositionPatient"), 3),
        orientation=_numbers(header.get("ImageOrientationPatient"), 6),
        spacing=_numbers(header.get("PixelSpacing"), 2),
        thickness=_thickness(header),
        rescale=_rescale(header),
        tags=_tags((name, header.get(name)) for name, _ in VOLUME_TAGS),
        pixels=pixels,
        problem=problem or _problem([header]),
    )
    shared = values_of(header.get("SharedFunctionalGroupsSequence"))
    groups = values_of(header.get("PerFrameFunctionalGroupsSequence"))
    if not groups:
        # Among several frames, a position in the header would belong to one.
        yield common if frames == 1 else replace(common, position=None)
        return
    described = f"a damaged DICOM file ({frames} frames, and {len(groups)} of them described)"
    require(len(groups) == frames, described)
    for frame, group in enumerate(groups):
        parts = (group, *shared)  # an attribute of the frame goes before one of all frames
        measures = first_item("PixelMeasuresSequence", *parts)
        transform = first_item("PixelValueTransformationSequence", *parts)
        place = first_item("PlanePositionSequence", *parts)
        plane = first_item("PlaneOrientationSequence", *parts)
        frame_tags = _tags((name, first_item(part, *parts).get(key)) for part, key, name in _FRAME_TAGS)
        yield replace(
            common,
            frame=frame,
            position=_numbers(place.get("ImagePositionPatient"), 3),
            orientation=_numbers(plane.get("ImageOrientationPatient"), 6),
            spacing=_numbers(measures.get("PixelSpacing"), 2),
            thickness=_thickness(measures),
            rescale=_rescale(transform),
            tags=common.tags | frame_tags,
            problem=problem or _problem([measures, transform, place, plane]),
        )


def _pixels(header: pydicom.Dataset) -> tuple[str, str]:
    """Return the text of the pixel format, and the fault of its description."""
    try:
        return PixelFormat.of(header).text, ""
    except ReaderError as error:
        return "", str(error)


def _problem(parts: Sequence[pydicom.Dataset]) -> str:
    """Name the fault of a header's geometry or intensity scale; empty without one."""
    for part in parts:
        for name, count in _NUMBERS.items():
            if values_of(part.get(name)) and _numbers(part.get(name), count) is None:
                return f"its header has a wrong {name}"
        slope, intercept = _rescale(part)
        if not 1 / _LARGEST_SCALE <= abs(slope) <= _LARGEST_SCALE:  # also for NaN
            return f"its header scales intensities by RescaleSlope {slope:g}"
        if not abs(intercept) <= _LARGEST_SCALE:
            return f"its header scales intensities by RescaleIntercept {intercept:g}"
        if problem := problem_of_edges(_numbers(part.get("PixelSpacing"), 2) or ()):
            return problem
    return ""


def _rescale(header: pydicom.Dataset) -> tuple[float, float]:
    """Return slope and intercept; NaN for a wrong one."""
    slope, intercept = (
        (_numbers(header.get(name), 1) or (np.nan,))[0] if values_of(header.get(name)) else default
        for name, default in (("RescaleSlope", 1.0), ("RescaleIntercept", 0.0))
    )
    return slope, intercept


def _thickness(header: pydicom.Dataset) -> float | None:
    for name in ("SpacingBetweenSlices", "SliceThickness"):
        value = _numbers(header.get(name), 1)
        if value and value[0]:
            return abs(value[0])
    return None


def _tags(pairs: Iterable[tuple[str, Any]]) -> dict[str, str]:
    pairs = [(name, value) for name, value in pairs if value is not None and value != ""]
    return {name: one_line("\\".join(map(str, values_of(value)))) for name, value in pairs}


def _numbers(value: Any, count: int) -> tuple[float, ...] | None:
    """Return the finite numbers of a value; ``None`` where they are not ``count``."""
    try:
        numbers = tuple(map(float, values_of(value)))
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == count and np.isfinite(numbers).all() else None


def values_of(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return [value] if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__") else [*value]


def first_item(sequence: str, *groups: pydicom.Dataset) -> pydicom.Dataset:
    """Return the first item of a sequence, from the first group that has one; else an empty item."""
    items = (item for group in groups for item in values_of(group.get(sequence))[:1])
    return next(items, pydicom.Dataset())


def items_of(dataset: pydicom.Dataset, sequence: str, *inner: str) -> Iterator[pydicom.Dataset]:
    """Yield the items of a sequence, or of the innermost of nested sequences."""
    for item in dataset.get(sequence) or ():
        yield from items_of(item, *inner) if inner else (item,)


def dataset_of(**values: Any) -> pydicom.Dataset:
    """Make an object, or an item of a sequence, from values by their keywords."""
    dataset = pydicom.Dataset()
    for name, value in values.items():
        setattr(dataset, name, value)
    return dataset


def one_line(value: Any) -> str:
    """Return a header's value as one line of printable characters."""
    text = "" if value is None else str(value)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
