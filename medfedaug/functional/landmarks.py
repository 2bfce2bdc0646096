"""Landmarks of an image's histogram, and the map that moves them to standard values (Nyúl and Udupa)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["PERCENTILES", "foreground_voxels", "histogram_landmarks", "map_landmarks"]

PERCENTILES = (1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 99)
"""Percentiles of `histogram_landmarks`: the deciles, and two near the ends, robust to outliers."""


def foreground_voxels(image: Tensor) -> Tensor:
    r"""Mask of the voxels at which any channel is brighter than its darkest voxel.

    Args:
        image: (C, \*spatial).

    Returns:
        (\*spatial), bool.
    """
    darkest = image.flatten(1).amin(dim=1).reshape(-1, *[1] * (image.ndim - 1))
    return (image > darkest).any(dim=0)


def histogram_landmarks(image: Tensor) -> Tensor:
    r"""The `PERCENTILES` of each channel of an image, over its foreground (`foreground_voxels`).

    For an image without foreground they are over all voxels.

    Args:
        image: (C, \*spatial).

    Returns:
        (C, 11), float64, on the CPU; without a gradient.

    Raises:
        ValueError: when a landmark is not finite, as in an image with NaN.

    Example:
        >>> histogram_landmarks(torch.arange(102.0)[None])[0, [0, 5, 10]].tolist()
        [2.0, 51.0, 100.0]
    """
    inside = image[:, foreground_voxels(image)]
    values = (inside if inside.numel() else image.flatten(1)).detach().cpu()
    if values.dtype != torch.float64:
        values = values.float()
    landmarks = np.percentile(values.numpy(), PERCENTILES, axis=1).T.astype(np.float64)
    if not np.isfinite(landmarks).all():
        raise ValueError("the image has voxels that are not finite, and so no landmarks")
    return torch.from_numpy(landmarks)


def map_landmarks(image: Tensor, landmarks: Tensor, standard: Tensor) -> Tensor:
    r"""Move an image's landmarks to a standard histogram's (Nyúl and Udupa, 2000).

    ::

        x′ = sᵢ + (x − lᵢ) (sᵢ₊₁ − sᵢ) / (lᵢ₊₁ − lᵢ),   lᵢ ≤ x < lᵢ₊₁,

    in each channel. The first and the last line extend beyond the landmarks. Equal landmarks, as in an image
    of few grey levels, have no line between them. A channel in which all are equal becomes 0.

    Args:
        image: (C, \*spatial), floating point.
        landmarks: l of the image, (C, L), in ascending order.
        standard: s, (C, L), in ascending order.

    Returns:
        The image, of the shape of ``image``.

    Example:
        >>> marks, goal = torch.tensor([[0.0, 2.0, 4.0]]), torch.tensor([[0.0, 0.8, 1.0]])
        >>> image = torch.tensor([[-1.0, 1.0, 3.0, 5.0]])
        >>> [round(v, 1) for v in map_landmarks(image, marks, goal)[0].tolist()]
        [-0.4, 0.4, 0.9, 1.1]
    """
    mapped = []
    for values, marks, goal in zip(image, landmarks.to(image.device), standard.to(image.device), strict=True):
        begin = (marks[1:] > marks[:-1]).nonzero().flatten()
        if not len(begin):
            mapped.append(torch.zeros_like(values))
            continue
        left, low = marks[begin].to(image), goal[begin].to(image)
        slope = ((goal[begin + 1] - goal[begin]) / (marks[begin + 1] - marks[begin])).to(image)
        line = (torch.searchsorted(left, values.contiguous(), right=True) - 1).clamp_min_(0)
        mapped.append(low[line] + (values - left[line]) * slope[line])
    return torch.stack(mapped)
