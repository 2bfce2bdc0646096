"""Compare an image with a run's record of its sites' images."""

from __future__ import annotations

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
