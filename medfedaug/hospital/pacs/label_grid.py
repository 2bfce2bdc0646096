"""`LabelGrid`: the label map of an image, filled from DICOM SEG or RTSTRUCT on the voxels of the image."""

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

import numpy as np
import shapely
from pydicom import Dataset

from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom.bounds import require
from medfedaug.hospital.dicom.headers import first_item, items_of
from medfedaug.hospital.dicom.segment_frames import SegmentFrame, segment_frames
from medfedaug.hospital.dicom.volumes import DicomSeries
from medfedaug.hospital.pacs.import_settings import ImportSettings

_NEAR = 0.05  # of a voxel: above rounding in headers, below another grid
_SLIVER = 0.01  # share of the smaller area: contours that touch, or a hole slightly beyond its border
_SAME = 1e-6  # share of the larger area: a contour that is listed twice
_EXCLUSIVE = "CLOSEDPLANAR_XOR"


class LabelGrid:
    """Label map on the grid of a series: ``voxels``, (X, Y, Z), are the numbers of the classes."""

    def __init__(self, series: DicomSeries, settings: ImportSettings) -> None:
        assert series.affine is not None
        self._series, self._settings = series, settings
        self._inverse = np.linalg.inv(np.diag([-1.0, -1, 1, 1]) @ series.affine)
        # Rank of each class in the order of `ImportSettings.priority`.
        self._rank = np.array([settings.priority.index(name) for name in settings.classes[1:]])
        self.voxels = np.zeros(series.shape, np.uint8)

    def add(self, dataset: Dataset, classes: Mapping[int, str]) -> None:
        """Add segments of a SEG or an RTSTRUCT."""
        rtstruct = dataset.get("Modality") == "RTSTRUCT"
        for name, mask in (self._contours if rtstruct else self._frames)(dataset, classes):
            index = self._settings.classes.index(name)
            before = self.voxels[mask]
            overlap = (before != 0) & (before != index)
            require(
                self._settings.overlap == "priority" or not overlap.any(),
                "segments of different classes overlap; --overlap priority gives the voxels to the class "
                "that --segments names first",
            )
            first = self._rank[np.maximum(before, 1) - 1] < self._rank[index - 1]
            self.voxels[mask] = np.where(overlap & first, before, index)

    def _index(self, points: np.ndarray) -> np.ndarray:
        """Convert points in millimetres, LPS, to voxel indices: (N, 3) to (N, 3)."""
        return points @ self._inverse[:3, :3].T + self._inverse[:3, 3]

    def _frames(self, dataset: Dataset, classes: Mapping[int, str]) -> Iterator[tuple[str, np.ndarray]]:
        masks: dict[str, np.ndarray] = {}
        for frame in segment_frames(dataset):
            name = classes.get(frame.number)
            if name is not None:
                mask = masks.setdefault(name, np.zeros(self._series.shape, bool))
                self._place(mask, frame)
        yield from masks.items()

    def _place(self, mask: np.ndarray, frame: SegmentFrame) -> None:
        pixels = frame.pixels
        try:
            first = np.array(first_item("PlanePositionSequence", *frame.groups).ImagePositionPatient, float)
            orientation = first_item("PlaneOrientationSequence", *frame.groups).ImageOrientationPatient
            spacing = np.array(first_item("PixelMeasuresSequence", *frame.groups).PixelSpacing, float)
        except (AttributeError, TypeError, ValueError) as error:
            raise ReaderError("a SEG whose frames do not say where they lie") from error
        row, column = np.reshape(np.array(orientation, float), (2, 3))
        rows, columns = np.nonzero(pixels)
        ends = np.array([[0, 0], [0, pixels.shape[1] - 1], [pixels.shape[0] - 1, 0]])
        for corners in (ends, np.stack([rows, columns], axis=1)):
            points = first + corners[:, 1:] * row * spacing[1] + corners[:, :1] * column * spacing[0]
            indices = self._index(points)
            require(np.isfinite(indices).all(), "a SEG whose frames do not say where they lie")
            off = np.abs(indices - np.rint(indices)).max(initial=0.0)
            require(off <= _NEAR, "a SEG on another grid than its image")
        cells = np.rint(indices).astype(int)
        inside = (cells >= 0).all() and (cells < mask.shape).all()
        require(inside, "a SEG that reaches beyond its image")
        mask[tuple(cells.T)] = True

    def _contours(self, dataset: Dataset, classes: Mapping[int, str]) -> Iterator[tuple[str, np.ndarray]]:
        for roi in items_of(dataset, "ROIContourSequence"):
            name = classes.get(int(roi.ReferencedROINumber))
            if name is None:
                continue
            slices: dict[int, list[tuple[str, np.ndarray]]] = {}
            for contour in items_of(roi, "ContourSequence"):
                kind = str(contour.get("ContourGeometricType"))
                closed = kind in ("CLOSED_PLANAR", _EXCLUSIVE)
                require(closed, "an RTSTRUCT with contours that are not closed")
                points = self._index(np.reshape(np.array(contour.ContourData, float), (-1, 3)))
                k = round(float(points[:, 2].mean()))
                off = np.abs(points[:, 2] - k).max()
                require(off <= _NEAR, "an RTSTRUCT whose contours lie between the slices of its image")
                slices.setdefault(k, []).append((kind, points[:, :2]))
            mask = np.zeros(self._series.shape, bool)
            for k, contours in slices.items():
                area = contour_area(contours)
                require(0 <= k < mask.shape[2], "an RTSTRUCT that reaches beyond its image")
                x, y = np.meshgrid(*map(np.arange, mask.shape[:2]), indexing="ij")
                shapely.prepare(area)
                mask[..., k] = shapely.intersects_xy(area, x, y)
            if mask.any():
                yield name, mask


def contour_area(contours: Iterable[tuple[str, np.ndarray]]) -> Any:
    """Return the area that the contours of a region enclose in one slice, a geometry of shapely.

    Contours of the type CLOSEDPLANAR_XOR are combined by exclusive disjunction (PS3.3, C.8.8.6.3). For
    several contours of the type CLOSED_PLANAR the standard has no rule: a contour within another one is a
    hole, one that is listed twice counts once, and contours that cross are refused. ``contours`` are pairs of
    Contour Geometric Type and points (N, 2).

    Example:
        >>> square = np.array([(0, 0), (4, 0), (4, 4), (0, 4)])
        >>> contour_area([("CLOSED_PLANAR", square), ("CLOSED_PLANAR", square / 4 + 1)]).area
        15.0
    """
    areas = [
        (kind, shapely.make_valid(shapely.Polygon(points))) for kind, points in contours if len(points) > 2
    ]
    plain = np.array([area for kind, area in areas if kind != _EXCLUSIVE], dtype=object)
    pairs = shapely.STRtree(plain).query(plain, predicate="intersects")
    first, second = pairs[:, pairs[0] < pairs[1]]
    shared = shapely.area(shapely.intersection(plain[first], plain[second]))
    sizes = shapely.area(plain)
    smaller, larger = (choose(sizes[first], sizes[second]) for choose in (np.minimum, np.maximum))
    require(
        not ((shared > _SLIVER * smaller) & (shared < (1 - _SLIVER) * smaller)).any(),
        "contours of one region cross in a slice, and the standard does not say whether their overlap "
        "belongs to it; redraw them",
    )
    once = np.delete(plain, second[larger - shared <= _SAME * larger])
    exclusive = [area for kind, area in areas if kind == _EXCLUSIVE]
    return reduce(shapely.symmetric_difference, [*once, *exclusive], shapely.Polygon())
