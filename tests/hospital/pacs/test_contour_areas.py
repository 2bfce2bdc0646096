import numpy as np
import pytest
import shapely

from medfedaug.errors import ReaderError
from medfedaug.hospital.pacs.contour_areas import joined_area

PLAIN, EXCLUSIVE = "CLOSED_PLANAR", "CLOSEDPLANAR_XOR"


def square(low, high, kind=PLAIN):
    return kind, np.array([(low, low), (high, low), (high, high), (low, high)], float)


@pytest.mark.parametrize(
    ("contours", "expected"),
    [
        ([], 0),
        ([square(0, 4)], 16),
        ([square(0, 4), square(5, 6)], 17),
        ([square(0, 4), square(4, 6)], 20),  # a corner in common
        ([square(0, 10), square(2, 8), square(4, 6)], 100 - 36 + 4),  # an island in a hole
        ([square(2, 8), square(0, 10)], 64),  # the hole first
        ([square(0, 4), square(0, 4), square(0, 4)], 16),
        ([square(0, 10), square(0.05, 9.95)], 100 - 9.9**2),  # a thin ring is no contour that comes twice
        ([square(0, 4, EXCLUSIVE), square(2, 6, EXCLUSIVE)], 24),
        ([square(0, 4, EXCLUSIVE), square(0, 4, EXCLUSIVE)], 0),
        ([square(0, 10), (PLAIN, np.array([(0, 0), (1, 1)], float))], 100),  # two points are no area
        ([(PLAIN, np.array([(0, 0), (4, 4), (4, 0), (0, 4)], float))], 8),  # a contour that crosses itself
    ],
)
def test_areas_of_contours(contours, expected):
    area, crossed = joined_area(contours)
    assert area.area == pytest.approx(expected)
    assert not crossed


def test_slivers_are_rounding_and_more_is_a_crossing():
    """Neighbours that overlap by 0.9%, and a hole that reaches 0.9% beyond its border."""
    wide = (PLAIN, np.array([(0, 0), (10, 0), (10, 10), (0, 10)], float))
    for edge, expected in ((9.91, 199.1), (9.5, None)):
        beside = (PLAIN, wide[1] + [edge, 0])
        if expected is None:
            with pytest.raises(ReaderError, match="--crossing union"):
                joined_area([wide, beside])
            area, crossed = joined_area([wide, beside], "union")
            assert (area.area, crossed) == (pytest.approx(195), True)
        else:
            area, crossed = joined_area([wide, beside])
            assert (area.area, crossed) == (pytest.approx(expected), False)
    hole = (PLAIN, np.array([(5, 4), (10.04, 4), (10.04, 6), (5, 6)], float))
    area, crossed = joined_area([wide, hole])
    assert not crossed
    assert not area.contains(shapely.Point(7, 5))


def test_a_slice_of_thousands_of_contours_is_joined():
    grid = [(3.0 * x, 3.0 * y) for x in range(40) for y in range(40)]
    contours = [(PLAIN, square(0, 2)[1] + place) for place in grid]
    contours += [(PLAIN, square(0.5, 1.5)[1] + place) for place in grid]
    assert joined_area(contours)[0].area == pytest.approx(3 * len(grid))
