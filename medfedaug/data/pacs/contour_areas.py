"""`joined_area`: the area that the closed contours of one region cover in one slice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import combinations
from typing import Any

import numpy as np
import shapely

from medfedaug.errors import ReaderError

__all__ = ["Contour", "joined_area"]

_SLIVER = 0.01  # of the smaller area: outlines that touch, or a hole drawn a little beyond its border
_SAME = 1e-6  # of the larger area: a contour that is listed twice

Contour = tuple[str, np.ndarray]
"""Contour Geometric Type, and points (N, 2)."""


def joined_area(contours: Iterable[Contour], crossing: str = "refuse") -> tuple[Any, bool]:
    """Join the contours of a region in one slice.

    Contours of the type CLOSEDPLANAR_XOR are combined by exclusive disjunction, as PS3.3, C.8.8.6.3 says. For
    several contours of the type CLOSED_PLANAR the standard has no rule. Usual programs read a contour within
    another one as a hole, and so does this function; a contour that is listed twice counts once. Contours
    that cross have no common reading: an exclusive disjunction cuts out what both enclose, a union fills a
    hole that reaches beyond its border.

    Args:
        contours: all of the region in the slice; a keyhole touches itself.
        crossing: ``refuse`` contours that cross, or take what any of them encloses (``union``).

    Returns:
        The area, a geometry of shapely, and whether contours crossed.

    Raises:
        ReaderError: for contours that cross, with ``refuse``.

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
    areas = _distinct(plain)
    overlaps = [_overlap(one, other) for one, other in combinations(areas, 2)]
    crossed = any(_SLIVER < share < 1 - _SLIVER for share in overlaps)
    if crossed and crossing == "refuse":
        raise ReaderError(
            "contours of one region cross in a slice, and the standard does not say whether their overlap "
            "belongs to it; redraw them, or --crossing union takes what any of them encloses"
        )
    parts = _united(areas, [0 < share < 1 - _SLIVER for share in overlaps])
    empty = shapely.Polygon()
    return reduce(lambda one, other: one.symmetric_difference(other), [*parts, *exclusive], empty), crossed


def _distinct(areas: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for area in areas:
        limit = _SAME * area.area
        if not any(area.symmetric_difference(one).area <= limit for one in found if one.intersects(area)):
            found.append(area)
    return found


def _overlap(one: Any, other: Any) -> float:
    """Share of the smaller area that lies in the other one; 1 is a hole."""
    smaller = min(one.area, other.area)
    return float(one.intersection(other).area / smaller) if smaller > 0 and one.intersects(other) else 0.0


def _united(areas: Sequence[Any], joined: Sequence[bool]) -> list[Any]:
    """Unions of areas that are joined, directly or through others; ``joined`` is of each pair."""
    group = [*range(len(areas))]
    for (one, other), together in zip(combinations(range(len(areas)), 2), joined, strict=True):
        if together:
            group = [group[one] if found == group[other] else found for found in group]
    members = [[area for area, found in zip(areas, group, strict=True) if found == n] for n in {*group}]
    return [shapely.union_all(some) for some in members]
