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

__all__ = ["Familiar"]

# Of the sites' mean deviation, and of the range of their deviations. By these two, of the training images of
# the sites themselves 1 of 65 is named for LGG, 0 of 67 for the retinal vessels, 50 of 1,213 for
# Office-Caltech 10; of a camera that was left out 15 of 15 (AVWIDE), 4 of 8 (VEVIO), 1 of 10 (STARE), 0 of 34
# (DRIVE, CHASEDB1).
_FARTHEST, _LARGEST_RATIO = 1.0, 2.0
_SPACING_RATIO = 1.2  # headers round, and scanners differ a little within a protocol


@dataclass(frozen=True)
class Familiar:
    """The ranges that the images of a federation span, as far as its run recorded them.

    Nothing is recorded of single images: a range runs from the lowest to the highest of the sites' averages,
    or of voxel edges from the lowest 10 % quantile to the highest 90 % quantile.

    Args:
        mean: the sites' mean intensities, (sites, C); empty where none were recorded.
        std: their mean deviations, the same.
        over: ``"image"`` or ``"foreground"``, what these are of.
        edges: the shortest and the longest edge of a voxel, mm, (2, 3) along the axes of RAS; ``None`` where
            the run recorded none.
    """

    mean: Tensor
    std: Tensor
    over: str
    edges: np.ndarray | None

    @classmethod
    def of(cls, runs: Sequence[FinishedRun]) -> Familiar:
        """Read the ``statistics.json`` of runs with the same settings, and their records of voxels' edges."""
        run = runs[0]
        channels = run.config.in_channels
        pairs = [p for one in runs for p in one.statistics.values() if p.num_channels == channels]
        over = run.composition.statistics_over
        prints = [
            entry for one in runs for entry in one.record.get("planned", {}).get("fingerprints", {}).values()
        ]
        edges = [levels for one in runs for levels in one.record.get(SPACING, {}).values()]
        means, stds = [pair.mean for pair in pairs], [pair.std for pair in pairs]
        as_stored = run.composition.intensity == "raw" and not run.config.plan.normalises
        if not pairs and as_stored:  # which is what fingerprints tell of
            pairs_of = [entry["intensity"] for entry in prints if len(entry["intensity"]) == channels]
            found = [torch.tensor(rows, dtype=torch.float64) for rows in pairs_of]
            means, stds, over = [f[:, 0] for f in found], [f[:, 1] for f in found], "image"
        none = torch.zeros(0, channels, dtype=torch.float64)
        return cls(
            torch.stack(means) if means else none,
            torch.stack(stds) if stds else none,
            over,
            _edges([*([e[level] for level in LEVELS] for e in edges), *(e["spacing"] for e in prints)]),
        )

    @property
    def sources(self) -> list[str]:
        """List what an image can be compared in: ``"intensity"``, ``"spacing"``, both or nothing."""
        found = {"intensity": bool(len(self.mean)), "spacing": self.edges is not None}
        return [name for name, known in found.items() if known]

    def intensity_warnings(self, moments: Mapping[str, Tensor], names: Sequence[str] = ()) -> list[str]:
        """Describe differences of an image's intensities from those of the sites.

        Args:
            moments: ``mean`` and ``std`` of the image, (C,) each, as the sites' statistics are computed.
            names: of the channels, where they have any.
        """
        if not len(self.mean):
            return []
        told = []
        low, high, scale = self.mean.amin(dim=0), self.mean.amax(dim=0), self.std.mean(dim=0)
        narrow, wide = self.std.amin(dim=0), self.std.amax(dim=0)
        for channel, (mean, std) in enumerate(zip(moments["mean"], moments["std"], strict=True)):
            where = f" of {names[channel]}" if names else f" of channel {channel}" if len(low) > 1 else ""
            if scale[channel] <= 0:  # the sites do not record the channel
                continue
            outside = float(
                torch.clamp(low[channel] - mean, min=0) + torch.clamp(mean - high[channel], min=0)
            )
            if outside > _FARTHEST * scale[channel]:
                told.append(
                    f"its mean intensity{where} is {mean:.3g}, {outside / float(scale[channel]):.1f} "
                    f"deviations outside the sites' {low[channel]:.3g} to {high[channel]:.3g}"
                )
            factor = _outside(float(std), float(narrow[channel]), float(wide[channel]))
            if std <= SIGMA_FLOOR * abs(mean):
                told.append(f"every voxel{where} has one intensity, {mean:.3g}, and at the sites they vary")
            elif factor > _LARGEST_RATIO:
                told.append(
                    f"its intensities{where} have a deviation of {std:.3g}, a factor of {factor:.1f} outside "
                    f"the sites' {narrow[channel]:.3g} to {wide[channel]:.3g}"
                )
        return told

    def spacing_warnings(self, affine: Any) -> list[str]:
        """Describe differences of an image's voxels from those of the sites.

        Args:
            affine: (4, 4), from voxels to millimetres in RAS; ``None`` where the file does not say.
        """
        if self.edges is None:
            return []
        if affine is None:
            return ["its file does not say how large its voxels are"]
        turned = edges_in_ras(affine)
        factors = [_outside(e, low, high) for e, low, high in zip(turned, *self.edges, strict=True)]
        if max(factors) <= _SPACING_RATIO:
            return []
        sizes, lows, highs = (" x ".join(f"{e:.3g}" for e in row) for row in (turned, *self.edges))
        return [
            f"its voxels are {sizes} mm, a factor of {max(factors):.1f} outside the sites' {lows} to "
            f"{highs} mm"
        ]


def _edges(spacings: Sequence[Any]) -> np.ndarray | None:
    """The lowest and the highest quantiles of the edges; a site whose files do not say has zeros."""
    known = [np.asarray(rows, dtype=float) for rows in spacings if np.asarray(rows, dtype=float).all()]
    return np.stack([np.min(known, axis=0)[0], np.max(known, axis=0)[-1]]) if known else None


def _outside(value: float, low: float, high: float) -> float:
    """The factor by which a value is outside of a range; 1 within it."""
    if value <= 0 or low <= 0:
        return 1.0
    return max(1.0, low / value, value / high)
