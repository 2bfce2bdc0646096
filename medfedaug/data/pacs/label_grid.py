"""`LabelGrid`: the label map of an image, filled from DICOM SEG or RTSTRUCT on the image's own voxels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import shapely
from pydicom import Dataset

from medfedaug.data.io.dicom_volumes import DicomSeries
from medfedaug.data.io.segment_frames import SegmentFrame, described_segments, segment_frames
from medfedaug.errors import ReaderError

__all__ = ["LabelGrid", "class_of", "referenced_series"]

_NEAR = 0.05  # of a voxel: rounding in headers is below, another grid above


def class_of(name: str, segments: Mapping[str, str]) -> str | None:
    """Return the class of a segment, by the first pattern that its name fits, without minding capitals.

    Example:
        >>> class_of("GTV 1", {"gtv*": "tumour"})
        'tumour'
    """
    bare = " ".join(name.split()).lower()
    return next((found for pattern, found in segments.items() if fnmatchcase(bare, pattern.lower())), None)


def referenced_series(dataset: Dataset) -> set[str]:
    """Return the SeriesInstanceUIDs that a SEG or an RTSTRUCT refers to."""
    found = {str(item.get("SeriesInstanceUID", "")) for item in dataset.get("ReferencedSeriesSequence") or []}
    for frame in dataset.get("ReferencedFrameOfReferenceSequence") or []:
        for study in frame.get("RTReferencedStudySequence") or []:
            items = study.get("RTReferencedSeriesSequence") or []
            found |= {str(item.get("SeriesInstanceUID", "")) for item in items}
    return found - {""}


class LabelGrid:
    """Label map on the grid of a series.

    Args:
        series: of the image.
        segments: patterns of segment names, each with its class; without any, all are ``foreground``.
        classes: the names, background first.
        overlap: ``refuse`` classes that overlap, or let the one that comes first in ``classes`` win
            (``priority``).

    Raises:
        ReaderError: for a series that does not say where it lies.
    """

    def __init__(
        self,
        series: DicomSeries,
        segments: Mapping[str, str],
        classes: Sequence[str],
        *,
        overlap: str = "refuse",
    ) -> None:
        if series.affine is None:
            raise ReaderError("the image does not say where it lies, so no label map can be put on it")
        self._series, self._segments, self._classes = series, segments, [*classes]
        self._overlap = overlap
        self._inverse = np.linalg.inv(np.diag([-1.0, -1, 1, 1]) @ series.affine)
        self.voxels = np.zeros(series.shape, np.uint8)
        self.used = 0

    def add(self, dataset: Dataset, threshold: float) -> None:
        """Add the segments of a SEG or an RTSTRUCT.

        Args:
            dataset: the object.
            threshold: share of its maximum from which a voxel of a fractional SEG counts.

        Raises:
            ReaderError: for segments that overlap, and for what lies on another grid.
        """
        rtstruct = dataset.get("Modality") == "RTSTRUCT"
        for name, mask in self._contours(dataset) if rtstruct else self._frames(dataset, threshold):
            index = self._classes.index(name)
            before = self.voxels[mask]
            taken = (before != 0) & (before != index)
            if taken.any() and self._overlap == "refuse":
                raise ReaderError(
                    "segments of different classes overlap; --overlap priority gives the voxels to the class "
                    "that --segments names first"
                )
            self.voxels[mask] = np.where(taken, np.minimum(before, index), index)
            self.used += 1

    def _named(self, label: str, several: bool) -> str | None:
        if self._segments:
            return class_of(label, self._segments)
        if several:
            raise ReaderError("holds several segments; name their classes with --segments 'NAME=CLASS'")
        return self._classes[1]

    def _index(self, points: np.ndarray) -> np.ndarray:
        """Voxel indices of points in millimetres, LPS: (N, 3) to (N, 3)."""
        return points @ self._inverse[:3, :3].T + self._inverse[:3, 3]

    # ------------------------------------------------------------------ DICOM SEG

    def _frames(self, dataset: Dataset, threshold: float) -> Iterator[tuple[str, np.ndarray]]:
        labels = described_segments(dataset)
        names = {number: self._named(label, len(labels) > 1) for number, label in labels.items()}
        masks: dict[str, np.ndarray] = {}
        for frame in segment_frames(dataset, threshold):
            name = names[frame.number]
            if name is not None:
                mask = masks.setdefault(name, np.zeros(self._series.shape, bool))
                self._place(mask, frame)
        yield from masks.items()

    def _place(self, mask: np.ndarray, frame: SegmentFrame) -> None:
        pixels = frame.pixels
        try:
            first = np.array(frame.first("PlanePositionSequence").ImagePositionPatient, float)
            turned = frame.first("PlaneOrientationSequence").ImageOrientationPatient
            spacing = np.array(frame.first("PixelMeasuresSequence").PixelSpacing, float)
        except (AttributeError, TypeError, ValueError) as error:
            raise ReaderError("a SEG whose frames do not say where they lie") from error
        row, column = np.reshape(np.array(turned, float), (2, 3))
        rows, columns = np.nonzero(pixels)
        ends = np.array([[0, 0], [0, pixels.shape[1] - 1], [pixels.shape[0] - 1, 0]])
        for where in (ends, np.stack([rows, columns], axis=1)):
            points = first + where[:, 1:] * row * spacing[1] + where[:, :1] * column * spacing[0]
            found = self._index(points)
            if not np.isfinite(found).all():
                raise ReaderError("a SEG whose frames do not say where they lie")
            if len(found) and np.abs(found - np.rint(found)).max() > _NEAR:
                raise ReaderError("a SEG on another grid than its image")
        cells = np.rint(found).astype(int)
        if (cells < 0).any() or (cells >= mask.shape).any():
            raise ReaderError("a SEG that reaches beyond its image")
        mask[tuple(cells.T)] = True

    # ------------------------------------------------------------------ RTSTRUCT

    def _contours(self, dataset: Dataset) -> Iterator[tuple[str, np.ndarray]]:
        rois = dataset.get("StructureSetROISequence") or []
        labels = {int(one.ROINumber): str(one.get("ROIName", "")) for one in rois}
        for roi in dataset.get("ROIContourSequence") or []:
            name = self._named(labels.get(int(roi.ReferencedROINumber), ""), len(labels) > 1)
            if name is None:
                continue
            areas: dict[int, Any] = {}
            for contour in roi.get("ContourSequence") or []:
                if contour.get("ContourGeometricType") not in ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR"):
                    raise ReaderError("an RTSTRUCT with contours that are not closed")
                points = self._index(np.reshape(np.array(contour.ContourData, float), (-1, 3)))
                k = round(float(points[:, 2].mean()))
                if np.abs(points[:, 2] - k).max() > _NEAR:
                    raise ReaderError("an RTSTRUCT whose contours lie between the slices of its image")
                if len(points) > 2:
                    # A keyhole touches itself; of nested contours the inner one is a hole.
                    area = shapely.make_valid(shapely.Polygon(points[:, :2]))
                    areas[k] = areas[k].symmetric_difference(area) if k in areas else area
            mask = np.zeros(self._series.shape, bool)
            for k, area in areas.items():
                if not 0 <= k < mask.shape[2]:
                    raise ReaderError("an RTSTRUCT that reaches beyond its image")
                x, y = np.meshgrid(*map(np.arange, mask.shape[:2]), indexing="ij")
                shapely.prepare(area)
                mask[..., k] = shapely.intersects_xy(area, x, y)
            if mask.any():
                yield name, mask
