"""Read the segments of a DICOM SEG frame by frame: binary, fractional, or as a label map."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from pydicom import Dataset

from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom.bounds import require
from medfedaug.hospital.dicom.headers import first_item, items_of
from medfedaug.hospital.dicom.pixels import stored_frames

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
    try:
        stored = stored_frames(dataset)
    except ReaderError as error:
        raise ReaderError(f"a SEG is damaged: {error}; fetch or export it again") from error
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
