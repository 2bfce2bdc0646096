"""Closed contours of a mask, each one ring: holes are joined to their outer ring by keyholes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def closed_contours(mask: np.ndarray) -> list[np.ndarray]:
    """Draw the contours of a mask half way between voxels.

    DICOM's RTSTRUCT has no holes: a hole is joined to the ring around it by a channel without width, the
    keyhole technique (PS3.3, C.8.8.6.3).

    Args:
        mask: (X, Y), true inside.

    Returns:
        Rings, (N, 2) in voxel indices, of which the last point is joined to the first; a voxel is in a ring
        if its centre is.

    Example:
        >>> closed_contours(np.eye(1))[0].tolist()
        [[-0.5, 0.0], [0.0, -0.5], [0.5, 0.0], [0.0, 0.5]]
    """
    import contourpy

    padded = np.pad(mask.astype(float), 1).T  # so that contours close at the border; rows are y
    drawn = contourpy.contour_generator(z=padded, fill_type=contourpy.FillType.OuterOffset).filled(0.5, 2.0)
    rings = []
    for points, offsets in zip(*drawn, strict=True):
        # The last point of each ring is the first once more.
        outer, *holes = (points[a : b - 1] - 1 for a, b in pairwise(offsets))
        # In this order, what is left of a hole is the outer ring, or a hole that is joined to it already.
        for hole in sorted(holes, key=lambda ring: float(ring[:, 0].min())):
            outer = _joined(outer, hole)
        rings.append(outer)
    return rings


def _joined(ring: np.ndarray, hole: np.ndarray) -> np.ndarray:
    """Join a hole to the ring around it, by a channel from its leftmost point to the left."""
    first = int(hole[:, 0].argmin())
    x, y = hole[first]
    ends = np.roll(ring, -1, axis=0)
    low, high = np.minimum(ring[:, 1], ends[:, 1]), np.maximum(ring[:, 1], ends[:, 1])
    crossing = np.flatnonzero((low <= y) & (y <= high) & (low < high))
    share = (y - ring[crossing, 1]) / (ends[crossing, 1] - ring[crossing, 1])
    met = ring[crossing, 0] + share * (ends[crossing, 0] - ring[crossing, 0])
    left = np.flatnonzero(met < x)
    nearest = left[met[left].argmax()]
    edge, gate = int(crossing[nearest]), np.array([[met[nearest], y]])
    round_it = np.concatenate([np.roll(hole, -first, axis=0), hole[first : first + 1]])
    return np.concatenate([ring[: edge + 1], gate, round_it, gate, ring[edge + 1 :]])
