"""DICOM SEG: write the prediction of a series in a file that a PACS stores with it; read SEGs frame by frame.

highdicom writes it, which is an extra: ``pip install 'medfedaug[dicom]'``.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydicom
from pydicom import Dataset
from pydicom.valuerep import CUSTOMIZABLE_CHARSET_VR

from medfedaug.data.io import base
from medfedaug.errors import DataError, ReaderError, first_line, translated
from medfedaug.hospital.dicom.checks import require
from medfedaug.hospital.dicom.headers import first_item, items_of
from medfedaug.hospital.dicom.identity import ModelIdentity, ObjectKind
from medfedaug.hospital.dicom.pixels import stored_frames
from medfedaug.hospital.dicom.series import open_series
from medfedaug.hospital.dicom.volumes import DicomSeries

OWN_CODES = "99MEDFEDAUG"  # coding scheme of classes
_SEG, _CONVERT = "DICOM SEG", "Convert the series to NIfTI."
_NEEDED = ("PatientID", "StudyInstanceUID", "FrameOfReferenceUID")
_COLOURS = ((230, 60, 50), (60, 130, 230), (60, 180, 75), (245, 180, 40), (145, 60, 180), (70, 200, 200))
_UTF8, _REPLACEMENT = "ISO_IR 192", "\ufffd"
_PLACED = ("ImageOrientationPatient", "PixelSpacing")


@dataclass(frozen=True)
class Segments(base.Segments):
    """Segments of a label map of some kind; ``notes`` are descriptions, by class."""

    model: ModelIdentity
    notes: Mapping[str, str] = field(default_factory=dict)
    kind: ObjectKind = ObjectKind.SEGMENTATION

    def type_of(self, number: int) -> Any:
        """Return the code of the class with a number, for highdicom: its name in `OWN_CODES`."""
        import highdicom as hd

        return hd.sr.CodedConcept(f"CLASS{number}", OWN_CODES, self.classes[number][:64])


def category() -> Any:
    """Return the category of all classes, made where it is used: the dictionary takes a while to import."""
    from pydicom.sr.codedict import codes

    return codes.SCT.SpatialAndRelationalConcept


def write_segmentation(path: Path, series: Path, voxels: np.ndarray, segments: Segments) -> None:
    """Write a DICOM SEG on the grid of a series, which is a folder or one of its files.

    ``voxels`` are a label map, (X, Y, Z), written as binary segments without the background; or
    probabilities, (X, Y, Z, K), written as fractional ones.
    """
    import highdicom as hd

    volume = open_series(series)
    slices = [pydicom.dcmread(file, stop_before_pixels=True) for file in volume.files]
    with writing(_SEG, series, _CONVERT):
        _check(volume, slices)
    step = volume.gap
    if volume.first.frames == 1:
        for slice_ in slices:  # a slice without a thickness is as thick as the step
            slice_.SliceThickness = slice_.get("SliceThickness") or step
    measures = hd.PixelMeasuresSequence(
        pixel_spacing=list(volume.slices[0].spacing or ()),
        slice_thickness=float(slices[0].get("SliceThickness") or step),
        spacing_between_slices=step,
    )
    algorithm = segments.model.algorithm()
    descriptions = []
    for number, name in enumerate(segments.classes[1:], start=1):
        description = hd.seg.SegmentDescription(
            segment_number=number,
            segment_label=name[:64],
            segmented_property_category=category(),
            segmented_property_type=segments.type_of(number),
            algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
            tracking_uid=segments.model.tracking_uid(volume, number),
            tracking_id=name[:64],
            display_color=hd.color.CIELabColor.from_rgb(*colour(number)),
        )
        if name in segments.notes:
            description.SegmentDescription = segments.notes[name]
        descriptions.append(description)
    fractional = voxels.ndim > 3
    kind = ObjectKind.PROBABILITIES if fractional else segments.kind
    # highdicom expects slices, rows, columns; a column is a step along x.
    frames = voxels[..., 1:].transpose(2, 1, 0, 3) if fractional else voxels.transpose(2, 1, 0)
    if volume.first.frames > 1:  # and the frames of one file in their stored order
        frames = frames[np.argsort([piece.frame for piece in volume.slices])]
    with writing(_SEG, series, _CONVERT):
        made = hd.seg.Segmentation(
            source_images=slices,
            pixel_array=np.ascontiguousarray(np.clip(frames, 0, 1) if fractional else frames),
            segmentation_type="FRACTIONAL" if fractional else "BINARY",
            segment_descriptions=descriptions,
            pixel_measures=measures,
            **segments.model.of_series(volume, kind),
            omit_empty_frames=not fractional and bool(voxels.any()),
        )
        save_object(made, slices[0], path)


@contextmanager
def writing(kind: str, series: Path, hint: str) -> Iterator[None]:
    """Turn an error of highdicom into a `DataError`, and silence its warnings about names without carets."""

    def refused(error: Exception) -> DataError:
        return DataError(f"no {kind} can be written for it: {first_line(error)}", path=series, hint=hint)

    with warnings.catch_warnings(), translated(AttributeError, KeyError, TypeError, ValueError, to=refused):
        warnings.simplefilter("ignore", UserWarning)
        yield


def save_object(made: Dataset, source: Dataset, path: Path) -> None:
    """Save an object in the character set of its image, or in UTF-8 where that lacks a character."""
    declared, texts = source.get("SpecificCharacterSet"), [*_texts(made)]
    decoded = not any(_REPLACEMENT in text for text in texts)
    require(decoded, "its header has a text that its character set cannot decode")
    # Without a character set, the bytes of a name are kept: nobody knows which letters they mean.
    known = declared or all(map(str.isascii, _texts(source)))
    for characters in (declared, _UTF8) if known else (None,):
        made.SpecificCharacterSet = characters
        if not characters:
            del made.SpecificCharacterSet
        with suppress(UnicodeEncodeError):
            made.save_as(path, enforce_file_format=True)
            if [*_texts(pydicom.dcmread(path, stop_before_pixels=True))] == texts:
                return
    raise ValueError("its header has a text, such as the patient's name, that would change")


def _texts(dataset: Dataset) -> Iterator[str]:
    """Yield all values that a character set encodes, also those of items."""
    for element in dataset.iterall():
        if element.VR in CUSTOMIZABLE_CHARSET_VR:
            yield str(element.value or "")


def colour(number: int) -> tuple[int, int, int]:
    """Return the colour, RGB, in which viewers should show a class."""
    return _COLOURS[(number - 1) % len(_COLOURS)]


def _check(volume: DicomSeries, slices: Sequence[Any]) -> None:
    frames = volume.first.frames
    of_one_file = len(slices) == 1 and frames == len(volume.slices)
    require(frames == 1 or of_one_file, "its frames are not one file's")
    needed = _NEEDED if frames > 1 else (*_NEEDED, *_PLACED)
    missing = ", ".join(name for name in needed if name not in slices[0])
    require(not missing, f"its files have no {missing}")


_KINDS = ("BINARY", "FRACTIONAL", "LABELMAP")


class SegmentFrame(NamedTuple):
    """Mask of a segment in one frame, (rows, columns), and functional groups of this and of all frames."""

    number: int
    pixels: np.ndarray
    groups: tuple[Dataset, ...]


def described_segments(dataset: Dataset) -> dict[int, str]:
    """Return the labels of the segments by their numbers, without the background of a label map."""
    segments = items_of(dataset, "SegmentSequence")
    labels = {int(item.SegmentNumber): str(item.get("SegmentLabel", "")) for item in segments}
    return {number: label for number, label in labels.items() if number != _background(dataset)}


def segment_frames(dataset: Dataset) -> Iterator[SegmentFrame]:
    """Decode a SEG, PS3.3 C.8.20; of a fractional one, pixels of half of its maximum count."""
    kind = dataset.get("SegmentationType")
    require(kind in _KINDS, "a SEG that is neither binary, fractional nor a map of labels")
    labels = described_segments(dataset)
    damaged = "a SEG is damaged: {}; fetch or export it again".format
    with translated(ReaderError, to=lambda error: ReaderError(damaged(error))):
        stored = stored_frames(dataset)
    highest = float(dataset.get("MaximumFractionalValue", 1)) if kind == "FRACTIONAL" else 1.0
    require(
        kind != "FRACTIONAL" or stored.max() <= highest,
        f"a SEG with values up to {stored.max()}, above its maximum of {highest:g}",
    )
    groups = dataset.get("PerFrameFunctionalGroupsSequence") or []
    require(len(groups) == len(stored), "a SEG whose frames are not all described")
    shared = [*items_of(dataset, "SharedFunctionalGroupsSequence")][:1]
    for frame, group in zip(stored, groups, strict=True):
        if kind == "LABELMAP":
            numbers = [int(number) for number in np.unique(frame) if number != _background(dataset)]
            masks = {number: frame == number for number in numbers}
        else:
            identity = first_item("SegmentIdentificationSequence", group, *shared)
            masks = {int(identity.ReferencedSegmentNumber): frame >= 0.5 * highest}
        require(masks.keys() <= labels.keys(), "a SEG with a segment that it does not describe")
        for number, pixels in masks.items():
            yield SegmentFrame(number, pixels, (group, *shared))


def _background(dataset: Dataset) -> int | None:
    """Return the value of the background in a label map; ``None`` for another kind."""
    is_map = dataset.get("SegmentationType") == "LABELMAP"
    return int(dataset.get("PixelPaddingValue") or 0) if is_map else None
