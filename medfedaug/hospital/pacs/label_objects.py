"""Read the SEGs and RTSTRUCTs of a study, choose among them, and draw the label map of its image.

A label map has one author for each class. Predictions are not ground truth; among several outlines of one
class one is chosen, or none; and no structure becomes background silently.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import shapely
from pydicom import Dataset

from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom.checks import require
from medfedaug.hospital.dicom.headers import first_item, items_of
from medfedaug.hospital.dicom.identity import is_own_object
from medfedaug.hospital.dicom.segmentation import SegmentFrame, described_segments, segment_frames
from medfedaug.hospital.dicom.volumes import DicomSeries
from medfedaug.hospital.pacs.object_check import reading_objects, referenced_series
from medfedaug.hospital.pacs.settings import BACKGROUND, NEWEST, ImportSettings
from medfedaug.utils.printable import counted

_LARGE = "64 KB"  # larger values, such as pixels, are read on access
_AUTOMATIC = "AUTOMATIC"


class LabelRefused(ReaderError):
    """The label objects of a study do not determine its label map.

    The text has no name that a person typed; ``segments``, for the site's list, has.
    """

    def __init__(self, text: str, segments: Sequence[str] = ()) -> None:
        self.segments = [*segments]
        super().__init__(text)


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
    automatic: bool
    empty: bool = False


@dataclass(frozen=True, eq=False)
class LabelObject:
    """Label object of a study, whose pixels are read on access."""

    dataset: Dataset
    segments: tuple[Segment, ...]  # without regions of points, which enclose no voxel
    references: frozenset[str]
    date: str  # date and time of its content, comparable as text
    own: bool  # this software wrote it

    @classmethod
    def read(cls, file: Path) -> "LabelObject":
        """Open an object."""
        with reading_objects("a label object is damaged"):
            dataset = pydicom.dcmread(file, defer_size=_LARGE)
            series = {str(item.get("SeriesInstanceUID", "")) for item in referenced_series(dataset)}
            segments = tuple(_segments(dataset))
            return cls(dataset, segments, frozenset(series - {""}), _date(dataset), is_own_object(dataset))

    @property
    def predicted(self) -> bool:
        """Return whether no person had a part in it."""
        return self.own or bool(self.segments and all(segment.automatic for segment in self.segments))

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
                item.get("SegmentAlgorithmType") == _AUTOMATIC,
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
            roi.get("ROIGenerationAlgorithm") == _AUTOMATIC,
            empty=not contour_types.get(int(roi.ROINumber)),
        )
        for roi in items_of(dataset, "StructureSetROISequence")
        if contour_types.get(int(roi.ROINumber)) != {"POINT"}
    ]


def _date(dataset: Dataset) -> str:
    for kind in ("Content", "StructureSet", "InstanceCreation", "Series"):
        if day := dataset.get(f"{kind}Date"):
            return f"{day}{dataset.get(f'{kind}Time') or '':0<6}"
    return ""


@dataclass(frozen=True, eq=False)
class Outline:
    """Chosen label object, with the classes of its chosen segments by number, without the background."""

    source: LabelObject
    classes: Mapping[int, str]


def possible_outlines(objects: Sequence[LabelObject], settings: ImportSettings) -> list[LabelObject]:
    """Return the objects that are not predictions; all, where the settings accept predictions."""
    return [item for item in objects if settings.automatic_labels or not item.predicted]


def choose_outlines(objects: Sequence[LabelObject], settings: ImportSettings) -> list[Outline]:
    """Choose among the label objects that refer to an image."""
    candidates = possible_outlines(objects, settings)
    if not candidates:
        raise LabelRefused("its label maps are predictions; --automatic-labels takes them")
    outlines = [_outline(item, settings) for item in candidates]
    named = [one for one in outlines if one.classes]
    if not named:
        names = [segment.name for item in candidates for segment in item.segments]
        raise LabelRefused("none of its segments has a name that --segments gives", names)
    chosen = _newest(named, settings)
    _check_background([one for one in outlines if one in chosen or not one.classes], settings)
    return chosen


def _class(segment: Segment, settings: ImportSettings) -> str | None:
    return class_of(segment.name, settings.segments) if settings.segments else settings.classes[1]


def _outline(source: LabelObject, settings: ImportSettings) -> Outline:
    taken = [segment for segment in source.segments if settings.automatic_labels or not segment.automatic]
    if not settings.segments and len(taken) > 1:
        raise LabelRefused(
            "holds several segments; name their classes with --segments 'NAME=CLASS'",
            [segment.name for segment in taken],
        )
    classes = ((segment.number, _class(segment, settings)) for segment in taken)
    return Outline(source, {number: name for number, name in classes if name and name != BACKGROUND})


def _newest(outlines: Sequence[Outline], settings: ImportSettings) -> list[Outline]:
    """Keep one object for each class: of several the newest, where the settings say so."""
    rivals = [one for one in outlines if any(other is not one and _shared(one, other) for other in outlines)]
    if not rivals:
        return [*outlines]
    pairs = combinations(rivals, 2)
    classes = ", ".join(sorted({name for one, other in pairs for name in _shared(one, other)}))
    text = f"has {len(rivals)} outlines, in {len({one.source.series for one in rivals})} series, of {classes}"
    names = [
        segment.name for one in rivals for segment in one.source.segments if segment.number in one.classes
    ]
    if NEWEST not in settings.label_series:
        raise LabelRefused(f"{text}; choose with --label-series UID, REGEX or newest", names)
    dates = [one.source.date for one in rivals]
    if "" in dates or len({*dates}) < len(dates):
        raise LabelRefused(f"{text}, and their dates do not say which is the newest", names)
    chosen: list[Outline] = []
    for one in sorted(rivals, key=lambda rival: rival.source.date, reverse=True):
        if not any(_shared(one, other) for other in chosen):
            chosen.append(one)
    return [one for one in outlines if one not in rivals or one in chosen]


def _shared(one: Outline, other: Outline) -> set[str]:
    return {*one.classes.values()} & {*other.classes.values()}


def _check_background(outlines: Sequence[Outline], settings: ImportSettings) -> None:
    """Refuse segments whose voxels would silently be background.

    These are segments without a class, and automatic ones of a class that no person outlined.
    """
    known = {BACKGROUND, *(name for one in outlines for name in one.classes.values())}
    lost = [
        segment
        for one in outlines
        for segment in one.source.segments
        if not segment.empty and segment.number not in one.classes and _class(segment, settings) not in known
    ]
    if lost:
        numbers = ", ".join(str(segment.number) for segment in lost)
        raise LabelRefused(
            f"{counted(len(lost), 'segment')} (number {numbers}) would become background: without a class in "
            "--segments, or automatic; give 'NAME=CLASS' or 'NAME=background', or --automatic-labels",
            [segment.name for segment in lost],
        )


_NEAR = 0.05  # of a voxel: above rounding in headers, below another grid
_SLIVER = 0.01  # share of the smaller area: contours that touch, or a hole slightly beyond its border
_SAME = 1e-6  # share of the larger area: a contour that is listed twice
_EXCLUSIVE = "CLOSEDPLANAR_XOR"


class LabelGrid:
    """Label map on the grid of a series: ``voxels``, (X, Y, Z), are the numbers of the classes."""

    def __init__(self, series: DicomSeries, settings: ImportSettings) -> None:
        self._series, self._settings = series, settings
        self._inverse = np.linalg.inv(np.diag([-1.0, -1, 1, 1]) @ series.stated_affine)
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
        with reading_objects("a SEG whose frames do not say where they lie"):
            first = np.array(first_item("PlanePositionSequence", *frame.groups).ImagePositionPatient, float)
            orientation = first_item("PlaneOrientationSequence", *frame.groups).ImageOrientationPatient
            spacing = np.array(first_item("PixelMeasuresSequence", *frame.groups).PixelSpacing, float)
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
