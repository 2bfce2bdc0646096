from __future__ import annotations

import contourpy
import numpy as np
import pytest
import shapely
from matplotlib.path import Path as Outline

from medfedaug.data.io.contours import closed_contours


def filled(rings, shape):
    """Voxels whose centres are in a ring, by matplotlib."""
    centres = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, 2)
    inside = [Outline([*ring, ring[0]], closed=True).contains_points(centres) for ring in rings]
    return np.array(inside).any(axis=0).reshape(shape) if inside else np.zeros(shape, bool)


def with_holes(mask):
    """Outer rings and holes of a mask, apart."""
    lines = contourpy.contour_generator(z=np.pad(mask.astype(float), 1).T).lines(0.5)
    return [line - 1 for line in lines]


def signed_area(ring):
    x, y = np.asarray(ring, float).T
    return 0.5 * (x * np.roll(y, -1) - np.roll(x, -1) * y).sum()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_random_masks_are_found_again(share):
    rng = np.random.default_rng(0)
    for _ in range(20):
        mask = rng.random((17, 23)) < share
        rings = closed_contours(mask)
        np.testing.assert_array_equal(filled(rings, mask.shape), mask)
        # Rings turn to the left, and their holes to the right; a channel has no width.
        assert sum(map(signed_area, rings)) == pytest.approx(sum(map(signed_area, with_holes(mask))))


def test_holes_in_a_row_and_an_island_in_a_hole():
    mask = np.zeros((30, 30), bool)
    mask[2:28, 2:28] = True
    mask[4:8, 10:14] = mask[10:14, 11:13] = mask[12:26, 18:26] = mask[18:20, 11:12] = False
    mask[16:20, 20:24] = True
    mask[17, 22] = False
    rings = closed_contours(mask)
    assert len(rings) == 2
    np.testing.assert_array_equal(filled(rings, mask.shape), mask)
    for ring in rings:
        # Cut along its channels it is one piece of the right size: nothing crosses.
        assert shapely.make_valid(shapely.Polygon(ring)).area == pytest.approx(shapely.Polygon(ring).area)


def test_nothing_has_no_contour_and_everything_reaches_the_border():
    assert closed_contours(np.zeros((4, 5), bool)) == []
    (ring,) = closed_contours(np.ones((4, 5), bool))
    assert (ring.min(), *ring.max(axis=0)) == (-0.5, 3.5, 4.5)
