"""Closed contours of a mask, with holes joined to their outer ring by keyholes."""

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
        Rings, (N, 2) in voxel indices, whose last point is joined to the first; a ring contains a voxel if it
        contains its centre.

    Example:
        >>> closed_contours(np.eye(1))[0].tolist()
        [[-0.5, 0.0], [0.0, -0.5], [0.5, 0.0], [0.0, 0.5]]
    """
    import contourpy

    padded = np.pad(mask.astype(float), 1).T  # closes contours at the border; rows are y
    drawn = contourpy.contour_generator(z=padded, fill_type=contourpy.FillType.OuterOffset).filled(0.5, 2.0)
    rings = []
    for points, offsets in zip(*drawn, strict=True):
        # The last point of each ring is the first once more.
        outer, *holes = (points[a : b - 1] - 1 for a, b in pairwise(offsets))
        # In this order, the ring left of a hole is the outer ring or a hole already joined to it.
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
    crossing_x = ring[crossing, 0] + share * (ends[crossing, 0] - ring[crossing, 0])
    left = np.flatnonzero(crossing_x < x)
    nearest = left[crossing_x[left].argmax()]
    edge, gate = int(crossing[nearest]), np.array([[crossing_x[nearest], y]])
    loop = np.concatenate([np.roll(hole, -first, axis=0), hole[first : first + 1]])
    return np.concatenate([ring[: edge + 1], gate, loop, gate, ring[edge + 1 :]])
