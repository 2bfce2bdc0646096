"""`image_measures`: numbers that describe an image, which change with the scanner and its settings."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from medfedaug.federation.planning.fingerprint import edges_in_ras

_QUANTILES = (5, 50, 95)  # %
_AXES = ("left-right", "front-back", "head-foot")
_MOST_VOXELS = 2**21  # of a channel; evenly spaced slices of a larger volume are measured
_LEAST = 1e-12


def image_measures(image: Tensor, affine: Any = None, channels: Sequence[str] = ()) -> dict[str, float]:
    """Return intensity quantiles, contrast, noise, sharpness, voxel sizes and extents of an image.

    The contrast is the standard deviation of the intensities. Noise and sharpness are measured in plane, in
    units of the contrast: noise is √(π/2)/6 of the mean absolute response to the mask of J. Immerkær, "Fast
    noise variance estimation", Computer Vision and Image Understanding 64 (1996); sharpness is the root mean
    square of the differences of neighbours.

    Args:
        image: (C, H, W) or (C, H, W, D), with the intensities that the model sees.
        affine: (4, 4), to millimetres; without it, extents are in pixels.
        channels: their names, for the names of the measures of an image with several.

    Example:
        >>> import torch
        >>> list(image_measures(torch.rand(1, 8, 8)))[:4]
        ['intensity 5%', 'intensity 50%', 'intensity 95%', 'contrast']
    """
    voxels = image.float().numpy()
    voxels = voxels[..., None] if voxels.ndim == 3 else voxels
    step = math.ceil(voxels[0].size / _MOST_VOXELS)
    measures: dict[str, float] = {}
    for number, volume in enumerate(voxels[..., ::step]):
        name = channels[number] if channels else f"channel {number}"
        prefix = f"{name}: " if len(voxels) > 1 else ""
        for level, value in zip(_QUANTILES, np.percentile(volume, _QUANTILES), strict=True):
            measures[f"{prefix}intensity {level}%"] = value
        contrast = max(float(volume.std()), _LEAST)
        slopes = [np.diff(volume, axis=axis) for axis in (0, 1)]
        curvature = np.diff(np.diff(volume, n=2, axis=0), n=2, axis=1)
        measures[f"{prefix}contrast"] = contrast
        noise = math.sqrt(math.pi / 2) / 6 * float(np.abs(curvature).mean()) if curvature.size else 0.0
        measures[f"{prefix}noise"] = noise / contrast
        energy = sum(float((slope**2).mean()) for slope in slopes if slope.size)
        measures[f"{prefix}sharpness"] = math.sqrt(energy) / contrast
    sizes = voxels.shape[1:]
    if affine is None:
        measures |= {f"pixels, axis {axis + 1}": size for axis, size in enumerate(sizes[:2])}
    else:
        extents = np.abs(np.asarray(affine, dtype=float)[:3, :3]) @ sizes
        for axis, edge, extent in zip(_AXES, edges_in_ras(affine), extents, strict=True):
            measures |= {f"voxel size, {axis}": edge, f"field of view, {axis}": extent}
    return {name: float(f"{value:.5g}") for name, value in measures.items()}
