"""Segments of a DICOM SEG, frame by frame: binary, fractional, or as a map of labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from pydicom import Dataset

from medfedaug.data.io.dicom_headers import first_item
from medfedaug.data.io.dicom_pixels import stored_frames
from medfedaug.errors import ReaderError

_KINDS = ("BINARY", "FRACTIONAL", "LABELMAP")


class SegmentFrame(NamedTuple):
    """Pixels of one segment in one frame.

    Args:
        pixels: (rows, columns), true in the segment.
        groups: functional groups of the frame, and of all frames.
    """

    number: int
    pixels: np.ndarray
    groups: tuple[Dataset, ...]


def described_segments(dataset: Dataset) -> dict[int, str]:
    """Return the labels of the segments by their numbers, without the background of a map of labels."""
    described = dataset.get("SegmentSequence") or []
    labels = {int(one.SegmentNumber): str(one.get("SegmentLabel", "")) for one in described}
    return {number: label for number, label in labels.items() if number != _background(dataset)}


def segment_frames(dataset: Dataset, threshold: float) -> Iterator[SegmentFrame]:
    """Decode a SEG, PS3.3 C.8.20.

    Args:
        dataset: the object.
        threshold: share of its maximum from which a pixel of a fractional SEG counts.

    Raises:
        ReaderError: for a SEG that contradicts itself.
        Exception: of a decoder.
    """
    kind = dataset.get("SegmentationType")
    if kind not in _KINDS:
        raise ReaderError("a SEG that is neither binary, fractional nor a map of labels")
    labels = described_segments(dataset)
    try:
        stored = stored_frames(dataset)
    except ReaderError as error:
        raise ReaderError(f"a SEG is damaged: {error}; fetch or export it again") from error
    highest = float(dataset.get("MaximumFractionalValue", 1)) if kind == "FRACTIONAL" else 1.0
    if kind == "FRACTIONAL" and stored.max() > highest:
        raise ReaderError(f"a SEG with values up to {stored.max()}, above its maximum of {highest:g}")
    groups = dataset.get("PerFrameFunctionalGroupsSequence") or []
    if len(groups) != len(stored):
        raise ReaderError("a SEG whose frames are not all described")
    shared = [*(dataset.get("SharedFunctionalGroupsSequence") or [])][:1]
    for frame, group in zip(stored, groups, strict=True):
        if kind == "LABELMAP":
            numbers = [int(number) for number in np.unique(frame) if number != _background(dataset)]
            found = {number: frame == number for number in numbers}
        else:
            identity = first_item("SegmentIdentificationSequence", group, *shared)
            limit = threshold * highest if kind == "FRACTIONAL" else 0.5
            found = {int(identity.ReferencedSegmentNumber): frame >= limit}
        if unknown := found.keys() - labels.keys():
            raise ReaderError(f"a SEG with a segment {min(unknown)} that it does not describe")
        for number, pixels in found.items():
            yield SegmentFrame(number, pixels, (group, *shared))


def _background(dataset: Dataset) -> int | None:
    """The value of a map of labels that is no segment."""
    return (
        int(dataset.get("PixelPaddingValue") or 0) if dataset.get("SegmentationType") == "LABELMAP" else None
    )
