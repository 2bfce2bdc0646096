"""`joined_area`: the area that the closed contours of one region cover in one slice."""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np
import shapely
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from medfedaug.errors import ReaderError

_SLIVER = 0.01  # share of the smaller area: outlines that touch, or a hole slightly beyond its border
_SAME = 1e-6  # share of the larger area: a contour that is listed twice

Contour = tuple[str, np.ndarray]
"""Contour Geometric Type, and points (N, 2)."""


def joined_area(contours: Iterable[Contour], crossing: str = "refuse") -> tuple[Any, bool]:
    """Join the contours of a region in one slice.

    Contours of the type CLOSEDPLANAR_XOR are combined by exclusive disjunction (PS3.3, C.8.8.6.3). For
    several contours of the type CLOSED_PLANAR the standard has no rule. This function reads a contour within
    another one as a hole, as usual programs do; a contour that is listed twice counts once. Contours that
    cross have no common reading: an exclusive disjunction removes their intersection, a union fills a hole
    that reaches beyond its border.

    Args:
        crossing: ``refuse`` contours that cross, or unite them (``union``).

    Returns:
        The area, a geometry of shapely, and whether contours crossed.

    Example:
        >>> square = np.array([(0, 0), (4, 0), (4, 4), (0, 4)])
        >>> joined_area([("CLOSED_PLANAR", square), ("CLOSED_PLANAR", square / 4 + 1)])[0].area
        15.0
        >>> area, crossed = joined_area([("CLOSED_PLANAR", square), ("CLOSED_PLANAR", square + 2)], "union")
        >>> area.area, crossed
        (28.0, True)
    """
    plain: list[Any] = []
    exclusive: list[Any] = []
    for kind, points in contours:
        if len(points) < 3:
            continue
        area = shapely.make_valid(shapely.Polygon(points))
        (exclusive if kind == "CLOSEDPLANAR_XOR" else plain).append(area)
    parts, crossed = _parts(_distinct(np.array(plain, dtype=object)))
    if crossed and crossing == "refuse":
        raise ReaderError(
            "contours of one region cross in a slice, and the standard does not say whether their overlap "
            "belongs to it; redraw them, or --crossing union takes what any of them encloses"
        )
    return _exclusive(np.array([*parts, *exclusive], dtype=object)), crossed


def _exclusive(areas: np.ndarray) -> Any:
    """Return the exclusive disjunction of areas: one by one where they touch, a union of the rest."""
    first, second, _ = _pairs(areas)
    return shapely.union_all(
        [reduce(shapely.symmetric_difference, group) for group in _groups(areas, first, second)]
    )


def _groups(areas: np.ndarray, first: np.ndarray, second: np.ndarray) -> list[np.ndarray]:
    """Group areas that pairs of indices link, directly or through others."""
    links = coo_array((np.ones(len(first)), (first, second)), shape=(len(areas), len(areas)))
    count, group = connected_components(links, directed=False) if len(areas) else (0, np.zeros(0))
    order = np.argsort(group, kind="stable")
    return np.split(areas[order], np.searchsorted(group[order], range(1, count)))[:count]


def _pairs(areas: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first and second indices of areas that touch, and the sizes of their intersections."""
    pairs = shapely.STRtree(areas).query(areas, predicate="intersects")
    first, second = pairs[:, pairs[0] < pairs[1]]
    return first, second, shapely.area(shapely.intersection(areas[first], areas[second]))


def _distinct(areas: np.ndarray) -> np.ndarray:
    """Leave out repeated areas."""
    first, second, shared = _pairs(areas)
    sizes = shapely.area(areas)
    larger = np.maximum(sizes[first], sizes[second])
    return np.delete(areas, second[(larger > 0) & (larger - shared <= _SAME * larger)])


def _parts(areas: np.ndarray) -> tuple[list[Any], bool]:
    """Return unions of areas that overlap without a hole, directly or through others, and if some cross."""
    first, second, shared = _pairs(areas)
    sizes = shapely.area(areas)
    smaller = np.minimum(sizes[first], sizes[second])
    share = np.divide(shared, smaller, out=np.zeros_like(shared), where=smaller > 0)
    joined = (share > 0) & (share < 1 - _SLIVER)
    crossed = bool((joined & (share > _SLIVER)).any())
    return [shapely.union_all(group) for group in _groups(areas, first[joined], second[joined])], crossed
