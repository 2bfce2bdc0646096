"""`connected_pieces`: count the pieces of a mask."""

from __future__ import annotations

import numpy as np
from scipy import ndimage


def connected_pieces(mask: np.ndarray) -> int:
    """Count the pieces of a boolean mask, whose voxels touch by a face, an edge or a corner.

    Example:
        >>> connected_pieces(np.eye(3, dtype=bool))
        1
    """
    return int(ndimage.label(mask, np.ones((3,) * mask.ndim))[1])
