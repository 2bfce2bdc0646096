import numpy as np
import pytest

from medfedaug.errors import ReaderError
from medfedaug.hospital.pacs.label_objects import contour_area

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
        ([square(0, 10), (PLAIN, square(0, 10)[1] + [9.95, 0])], 200 - 2 * 0.5),  # a sliver is rounding
    ],
)
def test_areas_of_contours(contours, expected):
    assert contour_area(contours).area == pytest.approx(expected)


def test_contours_that_cross_are_refused():
    with pytest.raises(ReaderError, match="contours of one region cross"):
        contour_area([square(0, 10), square(5, 15)])
