"""DICOM series as archives write them: found in folders, put in order, and named where they are left out.

`scan` walks a folder of any depth and opens every file once, whatever its name, without its voxels. It groups
the files into volumes: the slices of a series that have one orientation, and one echo, phase or b-value. Each
`DicomSeries` knows its geometry, and why it cannot be read where it cannot. `select` chooses among them, and
says of the others why not.
"""

from __future__ import annotations

import filecmp
import os
import re
import stat
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydicom
import SimpleITK as sitk
from pydicom.pixels import get_decoder
from pydicom.uid import UID

from medfedaug.errors import ConfigError, ReaderError, first_line

__all__ = [
    "DicomInstance",
    "DicomScan",
    "DicomSeries",
    "DicomSlice",
    "LeftOut",
    "Selection",
    "compile_series",
    "files_of_series",
    "is_dicom_file",
    "is_dicomdir",
    "load_series",
    "open_series",
    "place_of_series",
    "scan",
    "select",
]

# Of the usual distance between slices: rounding in the headers is far below, a slice that lacks far above.
_UNEVEN = 0.1
_ONE_PLACE = 0.01  # mm along the normal: slices that are nearer lie in one place
_TILT = 0.5  # degrees
_SHOWN = 3

# What tells the volumes of one series apart, in the order in which it is tried, with the words for it.
_APART = (
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
# The same in the functional groups of a frame: the sequence, the attribute in it, and its name above.
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
_TAGS = [
    *("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "SeriesNumber", "Modality"),
    *(
        "SeriesDescription",
        "ProtocolName",
        "ImageType",
        "InstanceNumber",
        "NumberOfFrames",
        "Rows",
        "Columns",
    ),
    *("SamplesPerPixel", "PhotometricInterpretation", "ImagePositionPatient", "ImageOrientationPatient"),
    *("PixelSpacing", "SliceThickness", "SpacingBetweenSlices"),
    *("BurnedInAnnotation", "FrameOfReferenceUID"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "DirectoryRecordSequence"),
    *(name for name, _ in _APART),
]

# Objects that hold pixels, or look as if they did, and are not the image of a patient.
_NO_IMAGES = {
    "1.2.840.10008.5.1.4.1.1.66.4": "DICOM SEG",
    "1.2.840.10008.5.1.4.1.1.66.7": "DICOM SEG",
    "1.2.840.10008.5.1.4.1.1.481.2": "RTDOSE",
    "1.2.840.10008.5.1.4.1.1.481.3": "RTSTRUCT",
    "1.2.840.10008.5.1.4.1.1.481.5": "RTPLAN",
    "1.2.840.10008.5.1.4.1.1.30": "parametric map",
    "1.2.840.10008.1.3.10": "DICOMDIR",
}
_SECONDARY_CAPTURES = {f"1.2.840.10008.5.1.4.1.1.7{part}" for part in ("", ".1", ".2", ".3", ".4")}

# Compressed syntaxes that SimpleITK's GDCM decodes; others are decoded by pydicom's plugins.
_BY_GDCM = {
    *("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2", "1.2.840.10008.1.2.1.99"),
    *(f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91)),
    "1.2.840.10008.1.2.5",
}


@dataclass(frozen=True)
class DicomSlice:
    """Slice of a series: a file, or a frame of a file that holds many.

    Args:
        file: where its voxels are.
        frame: its place in the file, from 0.
        instance: SOPInstanceUID of the file.
        number: InstanceNumber; ``None`` where there is none.
        columns: voxels along x.
        rows: voxels along y.
        channels: values of one voxel.
        position: of the centre of its first voxel, mm in LPS; ``None`` where the file does not say.
        orientation: the directions of its rows and its columns in LPS, six numbers.
        spacing: between rows and between columns, mm.
        thickness: of the slice, or the distance to the next one, mm.
        rescale: slope and intercept, of a frame; those of a file are applied by its reader.
        tags: what may tell it from slices in its place, as pairs of name and value.
    """

    file: Path
    frame: int
    instance: str
    number: int | None
    columns: int
    rows: int
    channels: int
    position: tuple[float, ...] | None
    orientation: tuple[float, ...] | None
    spacing: tuple[float, ...] | None
    thickness: float | None
    rescale: tuple[float, ...] | None
    tags: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class DicomInstance:
    """Header of one file, without anything that names a patient.

    Args:
        path: the file.
        study: StudyInstanceUID.
        series: SeriesInstanceUID.
        number: SeriesNumber, as text.
        description: SeriesDescription, or ProtocolName.
        modality: as the standard abbreviates it.
        sop_class: SOPClassUID.
        syntax: its transfer syntax.
        image_type: the values of ImageType.
        photometric: PhotometricInterpretation.
        frames: how many images the file holds.
        slices: one for each of them; none where the object is no image.
        burned_in: whether the header says that the pixels hold text.
        frame_of_reference: FrameOfReferenceUID: within one, positions are comparable.
    """

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
    slices: tuple[DicomSlice, ...]
    burned_in: bool = False
    frame_of_reference: str = ""

    @property
    def no_image(self) -> str:
        """The name of an object that is no image; empty for an image."""
        if self.slices:
            return ""
        name = UID(self.sop_class).name if self.sop_class else "object without a class"
        return _NO_IMAGES.get(self.sop_class, name.removesuffix(" Storage"))


class LeftOut(NamedTuple):
    """Files that are no case of anything, and why.

    Args:
        path: the file, the folder, or a file of the series.
        reason: in words, without a full stop.
    """

    path: Path
    reason: str


@dataclass(frozen=True, eq=False)
class DicomSeries:
    """The slices of a series that make one volume, in their order.

    Args:
        first: the header of one of its files.
        slices: along the normal of the slices, or by their numbers where they do not say where they lie.
        part: what tells it from other volumes of the series, in words; empty for the only one.
        problem: why it cannot be read, in words; empty where it can.
        remarks: what a user should know about it, a sentence each.
        burned_in: whether a header says that its pixels hold text.
    """

    first: DicomInstance
    slices: tuple[DicomSlice, ...]
    part: str = ""
    problem: str = ""
    remarks: tuple[str, ...] = ()
    burned_in: bool = False

    @property
    def uid(self) -> str:
        """SeriesInstanceUID of the series."""
        return self.first.series

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files of its slices, each once, in the order of the slices."""
        return tuple(dict.fromkeys(piece.file for piece in self.slices))

    @cached_property
    def folders(self) -> tuple[Path, ...]:
        """The folders that its files lie in."""
        return tuple(dict.fromkeys(sorted(file.parent for file in self.files)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels along x, y and z."""
        return self.slices[0].columns, self.slices[0].rows, len(self.slices)

    @property
    def channels(self) -> int:
        """Values of one voxel."""
        return self.slices[0].channels

    @cached_property
    def affine(self) -> np.ndarray | None:
        """(4, 4), from voxel indices to millimetres in RAS; ``None`` where the files do not say."""
        first, last = self.slices[0], self.slices[-1]
        if first.position is None or first.orientation is None or first.spacing is None:
            return None
        along_row, along_column = np.reshape(first.orientation, (2, 3))
        if len(self.slices) > 1 and last.position is not None:
            step = np.subtract(last.position, first.position) / (len(self.slices) - 1)
        else:
            step = np.cross(along_row, along_column) * (first.thickness or 1.0)
        affine = np.eye(4)
        affine[:3, 0] = along_row * first.spacing[1]
        affine[:3, 1] = along_column * first.spacing[0]
        affine[:3, 2], affine[:3, 3] = step, first.position
        affine[:2] *= -1
        return affine

    @property
    def gap(self) -> float:
        """The distance between slices along their normal, mm; of a single slice its thickness, or 1."""
        first, last = self.slices[0], self.slices[-1]
        if len(self.slices) < 2 or first.position is None or last.position is None:
            return first.thickness or 1.0
        apart = np.subtract(last.position, first.position) / (len(self.slices) - 1)
        return float(abs(_normal(first) @ apart))

    @property
    def is_secondary_capture(self) -> bool:
        """Return whether its objects are pictures of a screen or of paper, by their class."""
        return self.first.sop_class in _SECONDARY_CAPTURES

    @property
    def is_sheared(self) -> bool:
        """Return whether its slices follow each other obliquely to their normal, as under a tilted gantry."""
        if self.affine is None:
            return False
        return _tilt(self.affine[:3, 2], np.cross(self.affine[:3, 0], self.affine[:3, 1])) > _TILT

    @property
    def searched(self) -> str:
        """The text that `select` looks for a pattern in: number, description, part, modality, identity."""
        named = (self.first.number, self.first.description, self.part, self.first.modality, self.uid)
        return " ".join(filter(None, named))

    @property
    def text(self) -> str:
        """Describe the series for a list to choose from: description, part and number of slices."""
        number = f"series {self.first.number}" if self.first.number else "a series"
        named = [number, self.first.description, self.part, self.first.modality]
        return f"{' '.join(filter(None, named))} ({_count(len(self.slices), 'slice')}, UID {self.uid})"

    @property
    def doubt(self) -> str:
        """Reason why a prediction of a folder leaves the series out; empty for a usual series."""
        if "LOCALIZER" in self.first.image_type:
            return "a localiser"
        if self.is_secondary_capture:
            return "a secondary capture in colour" if self.channels > 1 else "a secondary capture"
        return ""


@dataclass(frozen=True)
class DicomScan:
    """Content of a folder with DICOM files.

    Args:
        series: the volumes, sorted by folder and identity.
        others: files that the caller takes for images of other formats.
        left_out: all else, with the reason.
    """

    series: tuple[DicomSeries, ...]
    others: tuple[Path, ...]
    left_out: tuple[LeftOut, ...]


@dataclass
class Selection:
    """Series of a scan that are cases.

    Args:
        chosen: the series.
        unclear: folders or files of which several series could be meant, with the reason.
        left_out: those that are not chosen, with the reason.
    """

    chosen: list[DicomSeries] = field(default_factory=list)
    unclear: list[LeftOut] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


# --- Headers ---------------------------------------------------------------------------------------------


def is_dicom_file(path: Path) -> bool:
    """Return whether a file begins as DICOM files do, whatever its name."""
    try:
        status = path.stat()
        return stat.S_ISREG(status.st_mode) and _begins_as_dicom(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=2**14)
def _begins_as_dicom(path: Path, modified: int, size: int) -> bool:
    with path.open("rb") as file:
        begin = file.read(132)
    # Before there was a preamble, files began with an element of group 8, in either order of bytes.
    little = begin[:2] in (b"\x02\x00", b"\x08\x00") and begin[3:4] == b"\x00"
    return begin[128:] == b"DICM" or little or begin[:3] == b"\x00\x08\x00"


def is_dicomdir(path: Path) -> bool:
    """Return whether a file is the index of a medium, whatever its name."""
    try:
        return _instance(path).no_image == "DICOMDIR"
    except ReaderError:
        return False


def _instance(path: Path) -> DicomInstance:
    """The header of a file, which is not opened again until it is written anew.

    Raises:
        ReaderError: in words, for what is no DICOM file, or a damaged one.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ReaderError("a link to nothing" if path.is_symlink() else _said(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise ReaderError("no regular file")
    if not status.st_size:
        raise ReaderError("empty")
    try:
        if not is_dicom_file(path):
            with path.open("rb"):  # so that one that must not be opened says so
                raise ReaderError("no DICOM file")
        return _read_instance(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ReaderError(f"cannot be opened ({_said(error)})") from error


@lru_cache(maxsize=2**15)
def _read_instance(path: Path, modified: int, size: int) -> DicomInstance:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are not as the standard has them
        try:
            header = pydicom.dcmread(path, stop_before_pixels=True, force=True, specific_tags=_TAGS)
            return _described(path, header)
        except (OSError, ReaderError):
            raise
        except Exception as error:  # a damaged header fails anywhere in pydicom
            raise ReaderError(f"a damaged DICOM file ({_said(error)})") from error


def _described(path: Path, header: pydicom.Dataset) -> DicomInstance:
    sop_class = str(header.get("SOPClassUID", ""))
    meta = getattr(header, "file_meta", None)
    if not sop_class and meta is not None:
        sop_class = str(meta.get("MediaStorageSOPClassUID", ""))
    if not sop_class and "Rows" not in header:
        raise ReaderError("a damaged DICOM file (its header says of nothing what it is)")
    frames = int(header.get("NumberOfFrames") or 1)
    if frames < 1:
        raise ReaderError(f"a damaged DICOM file ({frames} frames)")
    image = sop_class not in _NO_IMAGES and header.get("Rows") and header.get("Columns")
    syntax = str(meta.get("TransferSyntaxUID", "")) if meta is not None else ""
    return DicomInstance(
        path=path,
        study=str(header.get("StudyInstanceUID", "")),
        series=str(header.get("SeriesInstanceUID", "")),
        number=_plain(header.get("SeriesNumber")),
        description=_plain(header.get("SeriesDescription") or header.get("ProtocolName")),
        modality=_plain(header.get("Modality")),
        sop_class=sop_class,
        syntax=syntax or "1.2.840.10008.1.2",
        image_type=tuple(map(str, _list(header.get("ImageType")))),
        photometric=str(header.get("PhotometricInterpretation", "")),
        frames=frames,
        slices=tuple(_slices(path, header, frames)) if image else (),
        burned_in=str(header.get("BurnedInAnnotation", "")).strip().upper() == "YES",
        frame_of_reference=str(header.get("FrameOfReferenceUID", "")),
    )


def _slices(path: Path, header: pydicom.Dataset, frames: int) -> Iterator[DicomSlice]:
    number = header.get("InstanceNumber")
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
        rescale=None,
        tags=_tags((name, header.get(name)) for name, _ in _APART),
    )
    shared = _list(header.get("SharedFunctionalGroupsSequence"))
    groups = _list(header.get("PerFrameFunctionalGroupsSequence"))
    if not groups:
        # Of several frames a position in the header would be that of one.
        yield common if frames == 1 else replace(common, position=None)
        return
    if len(groups) != frames:
        raise ReaderError(f"a damaged DICOM file ({frames} frames, and {len(groups)} of them described)")
    for frame, group in enumerate(groups):
        # What is said of the frame goes before what is said of all.
        parts = _FunctionalGroups([group, *shared])
        measures = parts.first("PixelMeasuresSequence")
        transform = parts.first("PixelValueTransformationSequence")
        placed = parts.first("PlanePositionSequence").get("ImagePositionPatient")
        turned = parts.first("PlaneOrientationSequence").get("ImageOrientationPatient")
        slope = transform.get("RescaleSlope", 1)
        known = dict(common.tags)
        found = _tags((name, parts.first(sequence).get(key)) for sequence, key, name in _FRAME_TAGS)
        yield replace(
            common,
            frame=frame,
            position=_numbers(placed, 3),
            orientation=_numbers(turned, 6),
            spacing=_numbers(measures.get("PixelSpacing"), 2),
            thickness=_thickness(measures),
            rescale=(float(slope), float(transform.get("RescaleIntercept", 0))),
            tags=tuple(sorted({**known, **dict(found)}.items())),
        )


class _FunctionalGroups:
    """The functional groups that hold for one frame."""

    def __init__(self, groups: Sequence[pydicom.Dataset]) -> None:
        self.groups = groups

    def first(self, sequence: str) -> pydicom.Dataset:
        """The first item of a sequence, empty where no group has one."""
        found = (_list(group.get(sequence)) for group in self.groups)
        return next((items[0] for items in found if items), pydicom.Dataset())


def _thickness(found: pydicom.Dataset) -> float | None:
    for name in ("SpacingBetweenSlices", "SliceThickness"):
        value = _numbers(found.get(name), 1)
        if value and value[0]:
            return abs(value[0])
    return None


def _tags(pairs: Iterable[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    found = {}
    for name, value in pairs:
        if value is not None and value != "":
            found[name] = _plain("\\".join(map(str, _list(value))))
    return tuple(sorted(found.items()))


def _numbers(value: Any, count: int) -> tuple[float, ...] | None:
    """So many finite numbers, or ``None``."""
    try:
        found = tuple(float(one) for one in _list(value))
    except (TypeError, ValueError):
        return None
    return found if len(found) == count and np.isfinite(found).all() else None


def _list(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return (
        [value] if isinstance(value, (str, bytes, int, float)) or not hasattr(value, "__iter__") else [*value]
    )


def _plain(value: Any) -> str:
    """A header's value in one line of printable characters."""
    text = "" if value is None else str(value)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _said(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else first_line(error)


# --- Volumes ---------------------------------------------------------------------------------------------


def _volumes(instances: Sequence[DicomInstance]) -> list[DicomSeries]:
    """The volumes that the files of one series make."""
    first = instances[0]
    by_path = {instance.path: instance for instance in instances}
    parts: list[tuple[str, list[DicomSlice]]] = []
    turned = _by_orientation([piece for instance in instances for piece in instance.slices])
    for slices in turned:
        name = _orientation_name(slices[0]) if len(turned) > 1 else ""
        parts += [(", ".join(filter(None, (name, part))), group) for part, group in _apart(slices, [*_APART])]
    found = []
    for part, slices in parts:
        ordered, problem, remarks = _ordered(slices)
        own = [by_path[path] for path in dict.fromkeys(piece.file for piece in ordered)]
        problem = next(filter(None, map(_undecodable, own)), "") or problem
        if any(instance.photometric == "MONOCHROME1" for instance in own):
            remarks.append("its lowest values are white (MONOCHROME1), and are read as the highest")
        found.append(
            DicomSeries(
                own[0] if own else first,
                tuple(ordered),
                part,
                problem,
                tuple(remarks),
                burned_in=any(instance.burned_in for instance in own),
            )
        )
    return found


def _by_orientation(slices: Sequence[DicomSlice]) -> list[list[DicomSlice]]:
    """Slices by their orientation and their channels, the largest group first."""
    groups: list[list[DicomSlice]] = []
    for piece in slices:
        for group in groups:
            if piece.channels == group[0].channels and _alike(piece.orientation, group[0].orientation, 1e-3):
                group.append(piece)
                break
        else:
            groups.append([piece])
    return sorted(groups, key=len, reverse=True)


def _alike(one: Sequence[float] | None, other: Sequence[float] | None, tolerance: float) -> bool:
    if one is None or other is None or one == other:
        return one == other
    return bool(np.allclose(one, other, rtol=tolerance, atol=tolerance))


def _orientation_name(piece: DicomSlice) -> str:
    if piece.orientation is None:
        return "of no stated orientation"
    axis = int(np.abs(_normal(piece)).argmax())
    return ("sagittal", "coronal", "axial")[axis] + (" in colour" if piece.channels > 1 else "")


def _normal(piece: DicomSlice) -> np.ndarray:
    return np.cross(*np.reshape(piece.orientation or (1, 0, 0, 0, 1, 0), (2, 3)))


def _places(slices: Sequence[DicomSlice]) -> list[int]:
    """Where slices lie along their normal, so that those in one place have one number."""
    normal = _normal(slices[0])
    along = [float(normal @ np.asarray(piece.position)) for piece in slices]
    order = np.argsort(along)
    steps = np.diff(np.asarray(along)[order]) > _ONE_PLACE
    places = np.empty(len(slices), int)
    places[order] = np.concatenate([[0], np.cumsum(steps)])
    return places.tolist()


def _apart(slices: list[DicomSlice], tags: Sequence[tuple[str, str]]) -> list[tuple[str, list[DicomSlice]]]:
    """Slices of one orientation as volumes, where several lie in one place and a header says why."""
    if any(piece.position is None for piece in slices):
        return [("", slices)]
    most = max(Counter(_places(slices)).values())
    if most == 1:
        return [("", slices)]
    for index, (name, words) in enumerate(tags):
        groups: dict[str, list[DicomSlice]] = defaultdict(list)
        for piece in slices:
            groups[dict(piece.tags).get(name, "")].append(piece)
        # A time that each slice has of its own would make volumes of one slice.
        if not 1 < len(groups) <= most:
            continue
        if max(max(Counter(_places(group)).values()) for group in groups.values()) == most:
            continue
        found = []
        for value, group in sorted(groups.items(), key=lambda item: _numeric(item[0])):
            own = words.format(_short(value)) if value else f"without {name}"
            found += [
                (", ".join(filter(None, (own, more))), part)
                for more, part in _apart(group, tags[index + 1 :])
            ]
        return found
    return [("", slices)]


def _short(text: str) -> str:
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _numeric(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return np.inf, text


def _ordered(slices: list[DicomSlice]) -> tuple[list[DicomSlice], str, list[str]]:
    """Slices in the order in which they make a volume, what is wrong with them, and remarks."""
    first = slices[0]
    sizes = Counter((piece.columns, piece.rows) for piece in slices)
    if len(sizes) > 1:
        return slices, f"its slices differ in size: {_listed(sizes)}", []
    if any(not _alike(piece.spacing, first.spacing, 1e-3) for piece in slices):
        edges = Counter(piece.spacing or ("none",) for piece in slices)
        return slices, f"its slices differ in pixel spacing: {_listed(edges)}", []
    if any((piece.position is None) != (first.position is None) for piece in slices):
        return slices, "some of its slices do not say where they lie", []
    if first.position is None or first.orientation is None:
        return _by_number(slices)
    normal = _normal(first)
    length = float(np.linalg.norm(normal))
    if abs(length - 1) > _UNEVEN:
        return slices, "the directions of its rows and columns are not at right angles", []
    if first.spacing is not None and min(first.spacing) <= 0:
        return slices, f"its pixels are {first.spacing[1]:g} x {first.spacing[0]:g} mm", []
    along = (np.array([piece.position for piece in slices]) @ normal).tolist()
    order = sorted(range(len(slices)), key=lambda index: (along[index], slices[index].number or 0, index))
    ordered = [slices[index] for index in order]
    if len(ordered) == 1:
        return ordered, "", []
    gaps = np.diff([along[index] for index in order])
    usual = float(np.median(gaps))
    if gaps.max() <= _ONE_PLACE:
        return ordered, f"its {len(ordered)} slices lie in one place: a series in time is no volume", []
    if np.abs(gaps - usual).max() > _UNEVEN * abs(usual):
        odd = int(np.abs(gaps - usual).argmax())
        pair = " and ".join(dict.fromkeys(_place_name(piece) for piece in ordered[odd : odd + 2]))
        return (
            ordered,
            f"slices are missing, double or uneven: {len(ordered)} slices, {np.abs(gaps).min():.4g} to "
            f"{np.abs(gaps).max():.4g} mm apart; look at {pair}",
            [],
        )
    return _on_a_line(ordered, normal / length)


def _by_number(slices: list[DicomSlice]) -> tuple[list[DicomSlice], str, list[str]]:
    if len(slices) == 1:
        return slices, "", []
    if len({piece.file for piece in slices}) < len(slices):
        return slices, "all its slices are in one file, which does not say where each lies", []
    numbers = [piece.number for piece in slices]
    if None in numbers or len({*numbers}) < len(numbers):
        return slices, "its slices say neither where they lie nor in which order they follow", []
    remark = "its slices do not say where they lie, and follow each other by their numbers"
    return sorted(slices, key=lambda piece: piece.number or 0), "", [remark]


def _on_a_line(ordered: list[DicomSlice], normal: np.ndarray) -> tuple[list[DicomSlice], str, list[str]]:
    positions = np.array([piece.position for piece in ordered])
    step = (positions[-1] - positions[0]) / (len(ordered) - 1)
    off = positions - positions[0] - np.arange(len(ordered))[:, None] * step
    across = np.linalg.norm(off - np.outer(off @ normal, normal), axis=1).max()
    if across > 0.5 * min(ordered[0].spacing or (1.0,)):
        return ordered, f"its slices are shifted against each other by up to {across:.3g} mm", []
    tilt = _tilt(step, normal)
    if tilt > _TILT:
        remark = (
            f"its slices are sheared by {tilt:.3g} degrees (a tilted gantry): the affine says so, and "
            "the network sees them sheared"
        )
        return ordered, "", [remark]
    return ordered, "", []


def _tilt(step: np.ndarray, normal: np.ndarray) -> float:
    """Degrees between the way from slice to slice and the normal of the slices."""
    lengths = float(np.linalg.norm(step) * np.linalg.norm(normal))
    return float(np.rad2deg(np.arccos(min(1.0, abs(step @ normal) / lengths))))


def _place_name(piece: DicomSlice) -> str:
    return piece.file.name if not piece.frame else f"{piece.file.name}, frame {piece.frame + 1}"


def _listed(found: Counter[Any]) -> str:
    return ", ".join(
        f"{number} of {' x '.join(f'{n:g}' if n != 'none' else 'no spacing' for n in value)}"
        for value, number in found.most_common()
    )


def _undecodable(instance: DicomInstance) -> str:
    """Why the voxels of a file cannot be decoded; empty where they can."""
    if instance.frames > len(instance.slices):
        return "all its slices are in one file, which does not say where each lies"
    if instance.syntax in _BY_GDCM:
        return ""
    name = UID(instance.syntax).name
    try:
        decoder = get_decoder(UID(instance.syntax))
    except NotImplementedError:
        return f"compressed as {name}, which nothing here can read; have it sent uncompressed"
    return "" if decoder.is_available else _needs(name, decoder.missing_dependencies)


def _needs(name: str, missing: Sequence[str]) -> str:
    package = missing[0].rpartition("requires ")[2] if missing else "a plugin of pydicom"
    packages = [part.partition(">")[0] for part in package.split(" and ")]
    remedy = f"pip install {' '.join(packages)}"
    return f"compressed as {name}, which needs packages that are not installed: {remedy}"


# --- Folders ---------------------------------------------------------------------------------------------


def scan(
    root: Path,
    *,
    skip: Callable[[Path], str | None] = lambda folder: None,
    take: Callable[[Path], bool] = lambda file: False,
) -> DicomScan:
    """Look at all files in a folder and below it.

    Args:
        root: the folder. Links are followed, and no folder is walked twice.
        skip: says of a folder why it is left out; ``""`` leaves it out without a word, ``None`` takes it.
        take: says of a file that it is an image of another format by its name, and not to be opened.
    """
    instances: list[DicomInstance] = []
    others: list[Path] = []
    left_out: list[LeftOut] = []
    no_images: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for folder, files in _walk(root, skip, left_out, set()):
        for file in files:
            if take(file):
                others.append(file)
                continue
            try:
                found = _instance(file)
            except ReaderError as error:
                no_images[folder, str(error)].append(file)
                continue
            if found.no_image:
                no_images[folder, found.no_image].append(file)
                left_out += _not_there(found)
            else:
                instances.append(found)
    for (folder, reason), files in no_images.items():
        names = [file.name for file in files]
        some = ", ".join(_plain(name) for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        left_out.append(LeftOut(folder, f"{_count(len(names), 'file')}: {reason} ({some})"))
    series = _gathered(instances, left_out)
    return DicomScan(tuple(series), tuple(others), tuple(left_out))


def _walk(
    folder: Path, skip: Callable[[Path], str | None], left_out: list[LeftOut], seen: set[tuple[int, int]]
) -> Iterator[tuple[Path, list[Path]]]:
    try:
        status = folder.stat()
        inside = sorted(folder.iterdir())
    except OSError as error:
        left_out.append(LeftOut(folder, f"cannot be opened ({_said(error)})"))
        return
    if (status.st_dev, status.st_ino) in seen:
        left_out.append(LeftOut(folder, "a link to a folder that is looked at already"))
        return
    seen.add((status.st_dev, status.st_ino))
    visible = [path for path in inside if not path.name.startswith(".")]
    folders = [path for path in visible if path.is_dir()]
    yield folder, [path for path in visible if path not in {*folders}]
    for below in folders:
        reason = skip(below)
        if reason is None:
            yield from _walk(below, skip, left_out, seen)
        elif reason:
            left_out.append(LeftOut(below, reason))


def _not_there(index: DicomInstance) -> list[LeftOut]:
    """What a DICOMDIR lists and is not there."""
    if index.no_image != "DICOMDIR":
        return []
    records = _list(pydicom.dcmread(index.path, force=True).get("DirectoryRecordSequence"))
    listed = [_list(record.get("ReferencedFileID")) for record in records]
    missing = [
        str(Path(*parts)) for parts in listed if parts and not _inside(index.path.parent, parts).exists()
    ]
    if not missing:
        return []
    some = ", ".join(_plain(name) for name in missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
    return [LeftOut(index.path, f"lists {_count(len(missing), 'file')} that are not there ({some})")]


def _inside(folder: Path, parts: Sequence[str]) -> Path:
    for part in parts:  # a CD's names are in capitals, and its copies often in small letters
        folder = folder / part if (folder / part).exists() else folder / str(part).lower()
    return folder


def _gathered(instances: Sequence[DicomInstance], left_out: list[LeftOut]) -> list[DicomSeries]:
    """Volumes of all files: a series is what lies in one folder, or is spread over several."""
    by_series: dict[tuple[str, str], dict[Path, list[DicomInstance]]] = defaultdict(lambda: defaultdict(list))
    for instance in instances:
        by_series[instance.study, instance.series][instance.path.parent].append(instance)
    found: list[DicomSeries] = []
    for folders in by_series.values():
        if len(folders) > 1:
            folders = _without_copies(folders, left_out)
        together = _spread(folders)
        for group in [together] if together else folders.values():
            found += _volumes(group)
    return sorted(found, key=lambda series: (series.folders[0], series.first.number.zfill(6), series.uid))


def _without_copies(
    folders: dict[Path, list[DicomInstance]], left_out: list[LeftOut]
) -> dict[Path, list[DicomInstance]]:
    kept: dict[Path, list[DicomInstance]] = {}
    for folder, instances in folders.items():
        other = next((path for path, found in kept.items() if _copies(instances, found)), None)
        if other is None:
            kept[folder] = instances
        else:
            left_out.append(LeftOut(folder, f"a copy of the series in {other}"))
    return kept


def _copies(some: Sequence[DicomInstance], others: Sequence[DicomInstance]) -> bool:
    """Whether files are the same objects: identities alone are not always given once, so one is compared."""
    mine, theirs = (
        {piece.instance: found.path for found in group for piece in found.slices[:1]}
        for group in (some, others)
    )
    if mine.keys() != theirs.keys() or len(mine) < len(some):
        return False
    middle = sorted(mine)[len(mine) // 2]
    return filecmp.cmp(mine[middle], theirs[middle], shallow=False)


def _spread(folders: dict[Path, list[DicomInstance]]) -> list[DicomInstance] | None:
    """All files of a series that is spread over folders; ``None`` where each folder has its own."""
    if len(folders) < 2:
        return None
    together = [instance for instances in folders.values() for instance in instances]
    slices = [piece for instance in together for piece in instance.slices]
    names = {piece.instance for piece in slices}
    if len(names) < len(together) or any(piece.position is None for piece in slices):
        return None
    volumes = _volumes(together)
    apart = [volume for instances in folders.values() for volume in _volumes(instances)]
    whole = not any(volume.problem for volume in volumes)
    return together if whole and len(volumes) < len(apart) else None


# --- Choice ----------------------------------------------------------------------------------------------


def compile_series(pattern: str | None, option: str = "--series") -> re.Pattern[str] | None:
    """A regular expression of a user, which does not mind capitals.

    Raises:
        ConfigError: for what is none.
    """
    if pattern is None:
        return None
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"{option} {pattern!r} is no regular expression ({error})") from error


def select(series: Sequence[DicomSeries], pattern: str | None = None) -> Selection:
    """Choose one series of each study in each folder.

    Series in folders of their own are each a case. Of several in one folder that are of one study, one is
    taken: the one that ``pattern`` names, or the only one that is a usual volume, beside localisers,
    secondary captures and single slices.

    Args:
        series: of `scan`.
        pattern: the identity of a series, or a regular expression that is searched for, without minding
            capitals, in `DicomSeries.searched`.

    Raises:
        ConfigError: for a pattern that is no regular expression.
    """
    wanted = compile_series(pattern)
    groups: dict[tuple[tuple[Path, ...], str], list[DicomSeries]] = defaultdict(list)
    for one in series:
        groups[one.folders, one.first.study].append(one)
    found = Selection()
    for group in groups.values():
        if wanted is None:
            _usual(group, found)
            continue
        exact = [one for one in group if one.uid == pattern]
        meant = exact or [one for one in group if wanted.search(one.searched)]
        found.left_out += [
            LeftOut(_place(one), f"{one.text}: not what --series names") for one in group if one not in meant
        ]
        if len(meant) > 1:
            found.unclear.append(_unclear(meant, " of the name that --series gives"))
        found.chosen += meant if len(meant) == 1 else []
    return found


def _usual(group: Sequence[DicomSeries], found: Selection) -> None:
    deep = any(len(one.slices) > 1 and not one.doubt for one in group)
    doubts = [
        one.doubt or ("a single slice beside a volume" if deep and len(one.slices) == 1 else "")
        for one in group
    ]
    meant = [one for one, doubt in zip(group, doubts, strict=True) if not doubt]
    found.left_out += [
        LeftOut(_place(one), f"{one.text}: {doubt}; --series takes it")
        for one, doubt in zip(group, doubts, strict=True)
        if doubt
    ]
    if len(meant) == 1:
        found.chosen += meant
    elif meant:
        found.unclear.append(_unclear(meant))


def _place(series: DicomSeries) -> Path:
    return series.folders[0]


def _unclear(series: Sequence[DicomSeries], which: str = "") -> LeftOut:
    return LeftOut(_place(series[0]), f"{_several(series, which)}; choose one with --series REGEX or UID")


def _several(series: Sequence[DicomSeries], which: str = "") -> str:
    """What a folder holds that is not one volume."""
    names = {one.uid for one in series}
    if len(names) > 1:
        what = f"holds {len(names)} DICOM series{which}, one was expected"
    else:
        what = f"holds {len(series)} volumes of one DICOM series{which}, one was expected"
    return f"{what}: {'; '.join(one.text for one in series)}"


# --- Reading ---------------------------------------------------------------------------------------------


def open_series(path: Path) -> DicomSeries:
    """The one volume in a folder of any depth; or the one that a file is of, with the files beside it.

    Raises:
        ReaderError: where there is none, where it cannot be read, and where there are several, with what
            there is.
    """
    if path.is_dir():
        found = scan(path)
        series = found.series
        if not series:
            reasons = "; ".join(reason for _, reason in found.left_out[:_SHOWN])
            raise ReaderError("holds no DICOM series, one was expected" + (f": {reasons}" if reasons else ""))
    else:
        series = tuple(_beside(path))
    if len(series) > 1:
        raise ReaderError(
            f"{_several(series)}; give a file of the one that is meant in place of the folder"
            if path.is_dir()
            else f"{_several(series)}; export them into files of their own"
        )
    if series[0].problem:
        raise ReaderError(series[0].problem)
    return series[0]


def _beside(path: Path) -> list[DicomSeries]:
    """The volumes that a file has slices of."""
    own = _instance(path)
    if own.no_image:
        raise ReaderError(f"no image: {own.no_image}")
    instances = []
    for file in sorted(path.parent.iterdir()):
        if is_dicom_file(file) and not file.name.startswith("."):
            try:
                found = _instance(file)
            except ReaderError:
                continue
            if found.slices and (found.study, found.series) == (own.study, own.series):
                instances.append(found)
    if path not in {instance.path for instance in instances}:
        instances.append(own)
    return [one for one in _volumes(instances) if path in one.files]


def place_of_series(series: DicomSeries, others: Sequence[DicomSeries]) -> Path | None:
    """The path by which `open_series` finds a series: a folder that holds no other, or its first file.

    Args:
        series: the series.
        others: all series of the same scan.

    Returns:
        The path, or ``None`` for one that is spread over folders in which there are others.
    """
    folder = Path(os.path.commonpath(series.folders))
    beside = [one for one in others if any(path.is_relative_to(folder) for path in one.folders)]
    if len(beside) == 1:
        return folder
    return series.files[0] if len(series.folders) == 1 else None


def files_of_series(path: Path) -> list[Path]:
    """The files of the volume in a folder, or of the one that a file is of, sorted.

    Of a folder without one whole volume all files, and of another file itself alone.
    """
    if not path.is_dir() and not is_dicom_file(path):
        return [path]
    try:
        return sorted(open_series(path).files)
    except (ReaderError, OSError):
        return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def load_series(series: DicomSeries) -> sitk.Image:
    """The voxels of a series, float32 in the units of its modality, on its own grid.

    Each slice is rescaled by its own slope and intercept, as in PET. GDCM decodes the files, or pydicom what
    GDCM cannot.

    Raises:
        RuntimeError: whatever the reader raises.
    """
    files = series.files
    single = len(files) == len(series.slices) and series.first.frames == 1
    image = _read_gdcm(files, colour=series.channels > 1) if single else None
    if image is None:
        image = sitk.GetImageFromArray(_frames(series), isVector=series.channels > 1)
    affine = series.affine
    # Where the files do not say, indices count as millimetres.
    lps = np.diag([-1.0, -1, 1, 1]) @ affine if affine is not None else np.eye(4)
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    return image


def _read_gdcm(files: Sequence[Path], colour: bool) -> sitk.Image | None:
    """An image of one file or of several as slices; ``None`` where pydicom has to decode them.

    Raises:
        RuntimeError: where GDCM cannot read files that pydicom cannot read either.
    """
    syntaxes = {_instance(file).syntax for file in files}
    if not syntaxes <= _BY_GDCM:
        return None
    # As floating point, since each slice may have a slope of its own (PET).
    pixel = sitk.sitkVectorFloat32 if colour else sitk.sitkFloat32
    names = [str(file) for file in files]
    shown = sitk.ProcessObject.GetGlobalWarningDisplay()
    sitk.ProcessObject.SetGlobalWarningDisplay(False)  # of slices that are sheared it would print a line
    try:
        return sitk.ReadImage(names if len(names) > 1 else names[0], pixel)
    except RuntimeError:
        if all(UID(syntax).is_compressed and get_decoder(UID(syntax)).is_available for syntax in syntaxes):
            return None
        raise
    finally:
        sitk.ProcessObject.SetGlobalWarningDisplay(shown)


def _frames(series: DicomSeries) -> np.ndarray:
    """The slices of a series, (Z, Y, X) or (Z, Y, X, C), file by file."""
    decoded: dict[Path, np.ndarray] = {}
    slices = []
    for piece in series.slices:
        if piece.file not in decoded:
            own = [other for other in series.slices if other.file == piece.file]
            decoded[piece.file] = _decode(piece.file, own)
        slices.append(decoded[piece.file][piece.frame])
    return np.stack(slices)


def _decode(file: Path, slices: Sequence[DicomSlice]) -> np.ndarray:
    """All frames of a file, rescaled."""
    colour = slices[0].channels > 1
    if len({piece.rescale for piece in slices}) == 1:  # GDCM has one slope for all frames
        image = _read_gdcm([file], colour)
        if image is not None:
            found = sitk.GetArrayFromImage(image)
            return found if found.ndim == (4 if colour else 3) else found[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = pydicom.dcmread(file, force=True)
        try:
            stored = np.asarray(dataset.pixel_array, dtype=np.float64)
        except Exception as error:  # a plugin's own, or that there is none
            syntax = UID(_instance(file).syntax)
            missing = [] if (decoder := get_decoder(syntax)).is_available else decoder.missing_dependencies
            raise ReaderError(_needs(syntax.name, missing) if missing else _said(error)) from error
        slope, intercept = float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))
    if dataset.get("PhotometricInterpretation") == "MONOCHROME1":  # as GDCM has it
        stored = (-1 if dataset.PixelRepresentation else 2**dataset.BitsStored - 1) - stored
    result = stored if stored.ndim == (4 if colour else 3) else stored[None]
    for piece in slices:
        factor, offset = piece.rescale or (slope, intercept)
        result[piece.frame] = result[piece.frame] * factor + offset
    return result.astype(np.float32)
