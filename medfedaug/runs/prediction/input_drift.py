"""Measures of an image, and its distance from a run's record of its sites' images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfedaug.federation.job_folder import LEVELS, SPACING
from medfedaug.federation.planning.fingerprint import edges_in_ras
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.statistics import SIGMA_FLOOR

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


# Limits in units of the sites' mean deviation, and of the range of their deviations. `docs/use.md` has the
# measured rates of warnings.
_FARTHEST, _LARGEST_RATIO = 1.0, 2.0
_SPACING_RATIO = 1.2  # headers round, and scanners differ a little within a protocol


@dataclass(frozen=True)
class DriftReference:
    """Ranges of the images of a federation, as far as its run recorded them.

    The run records nothing of single images: a range runs from the lowest to the highest of the sites'
    averages, or of voxel edges from the lowest 10 % quantile to the highest 90 % quantile.

    Args:
        mean: the sites' mean intensities, (sites, C); empty where none were recorded.
        std: their mean standard deviations, in the same form.
        over: the voxels of both, ``"image"`` or ``"foreground"``.
        edges: the shortest and the longest edge of a voxel, mm, (2, 3) along the axes of RAS; ``None`` where
            the run recorded none.
        whose: owner of the ranges, for messages.
        farthest: limit of a mean intensity beyond the range, in units of the mean standard deviation.
        largest_ratio: limit of the factor by which a standard deviation is outside the range.
    """

    mean: Tensor
    std: Tensor
    over: str
    edges: np.ndarray | None
    whose: str = "the sites'"
    farthest: float = _FARTHEST
    largest_ratio: float = _LARGEST_RATIO

    @classmethod
    def of(cls, run: FinishedRun) -> DriftReference:
        """Read the ``statistics.json`` of a run, and its record of voxels' edges."""
        channels = run.config.in_channels
        pairs = [pair for pair in run.statistics.values() if pair.num_channels == channels]
        edges = run.record.get(SPACING, {}).values()
        empty = torch.zeros(0, channels, dtype=torch.float64)
        return cls(
            torch.stack([pair.mean for pair in pairs]) if pairs else empty,
            torch.stack([pair.std for pair in pairs]) if pairs else empty,
            run.composition.statistics_over,
            _edges([[levels[level] for level in LEVELS] for levels in edges]),
        )

    @property
    def sources(self) -> list[str]:
        """The recorded properties: ``"intensity"``, ``"spacing"``, both or none."""
        recorded = {"intensity": bool(len(self.mean)), "spacing": self.edges is not None}
        return [name for name, known in recorded.items() if known]

    def intensity_warnings(self, moments: Mapping[str, Tensor], names: Sequence[str] = ()) -> list[str]:
        """Describe an image's intensities outside the sites' ranges, from its ``mean`` and ``std``, (C,)."""
        if not len(self.mean):
            return []
        warnings = []
        low, high, scale = self.mean.amin(dim=0), self.mean.amax(dim=0), self.std.mean(dim=0)
        narrow, wide = self.std.amin(dim=0), self.std.amax(dim=0)
        for channel, (mean, std) in enumerate(zip(moments["mean"], moments["std"], strict=True)):
            where = f" of {names[channel]}" if names else f" of channel {channel}" if len(low) > 1 else ""
            if scale[channel] <= 0:  # the sites do not record the channel
                continue
            outside = float(
                torch.clamp(low[channel] - mean, min=0) + torch.clamp(mean - high[channel], min=0)
            )
            if outside > self.farthest * scale[channel]:
                warnings.append(
                    f"its mean intensity{where} is {mean:.3g}, {outside / float(scale[channel]):.1f} "
                    f"standard deviations outside {self.whose} {low[channel]:.3g} to {high[channel]:.3g}"
                )
            factor = _outside(float(std), float(narrow[channel]), float(wide[channel]))
            if std <= SIGMA_FLOOR * abs(mean) and narrow[channel] > 0:
                warnings.append(f"every voxel{where} has one intensity, {mean:.3g}; {self.whose} vary")
            elif factor > self.largest_ratio:
                warnings.append(
                    f"its intensities{where} have a standard deviation of {std:.3g}, a factor of "
                    f"{factor:.1f} outside {self.whose} {narrow[channel]:.3g} to {wide[channel]:.3g}"
                )
        return warnings

    def spacing_warnings(self, affine: Any) -> list[str]:
        """Describe an image's voxel sizes outside the sites' range, from its affine, (4, 4), if any."""
        if self.edges is None:
            return []
        if affine is None:
            return ["its file does not say how large its voxels are"]
        edges = edges_in_ras(affine)
        factor = max(_outside(e, low, high) for e, low, high in zip(edges, *self.edges, strict=True))
        if factor <= _SPACING_RATIO:
            return []
        sizes, lows, highs = (" x ".join(f"{e:.3g}" for e in row) for row in (edges, *self.edges))
        return [
            f"its voxels are {sizes} mm, a factor of {factor:.1f} outside {self.whose} {lows} to {highs} mm"
        ]


def _edges(spacings: Sequence[Any]) -> np.ndarray | None:
    """Return the lowest and the highest quantiles of the edges; a site with unknown edges has zeros."""
    known = [rows for rows in (np.asarray(rows, dtype=float) for rows in spacings) if rows.all()]
    return np.stack([np.min(known, axis=0)[0], np.max(known, axis=0)[-1]]) if known else None


def _outside(value: float, low: float, high: float) -> float:
    """Return the factor by which a value is outside of a range; 1 within it."""
    if value <= 0 or low <= 0:
        return 1.0
    return max(1.0, low / value, value / high)
