"""Check whether the volumes of a site have comparable scales of intensity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from medfedaug.data.base import SiteFolder, spread
from medfedaug.errors import DataError

WILD = 5.0
"""Ratio of ranges from which a site's volumes are called uneven; those of LGG differ by up to 1.7."""

_LOOKED_AT = 20  # volumes of a site, evenly from its list
_VOXELS = 200_000  # of a volume, evenly from all


@dataclass(frozen=True)
class UnevenScales:
    """The two volumes of a site whose intensity ranges differ most.

    Attributes:
        ranges: their ranges, from the 1st to the 99th percentile, in the units of the file.
    """

    site: str
    narrow: str
    wide: str
    ranges: tuple[float, float]
    cases: int

    @property
    def ratio(self) -> float:
        """The ratio of the larger range to the smaller one."""
        return self.ranges[1] / self.ranges[0]

    def __str__(self) -> str:
        low, high = self.ranges
        return f"{self.narrow} covers {low:.3g}, {self.wide} {high:.3g}, {self.ratio:.3g} times as much"

    def sentence(self, intensity: str = "raw") -> str:
        """The finding and the remedy in one line.

        Args:
            intensity: ``"scale"`` where each volume is scaled already, ``"z_score"`` where a plan normalises
                each by itself, ``"raw"`` where neither is.
        """
        found = f"{self.site}: its volumes lie on wildly different scales of intensity ({self})"
        if intensity == "scale":
            return f"{found}; --intensity scale, as here, brings each to [0, 1]."
        if intensity == "z_score":
            return f"{found}; the plan's normalisation brings each to mean 0 and deviation 1."
        return f"{found}. Statistics of them all fit none of them: use --intensity scale."


def find_uneven_scales(site: SiteFolder) -> UnevenScales | None:
    """The most different volumes of a site, if their ranges differ by a factor of `WILD` or more.

    The range of a volume runs from its 1st to its 99th percentile, since one hot voxel, or metal in a CT,
    says nothing of a scale. Of several channels, the one that differs most counts.
    """
    if site.scaling == "fixed":
        return None
    cases = spread(site.cases["training"] or site.cases["test"], _LOOKED_AT)
    ranges = torch.stack([_ranges(site.load_image(case)) for case in cases])  # (cases, C)
    return most_uneven(site.name, [case.name for case in cases], ranges.tolist())


def most_uneven(site: str, cases: Sequence[str], ranges: Sequence[Sequence[float]]) -> UnevenScales | None:
    """The two volumes whose ranges differ most, if by a factor of `WILD` or more."""
    worst: UnevenScales | None = None
    for channel in zip(*ranges, strict=True):
        # A channel that is constant in a volume, as where a sequence was not taken, has no scale.
        known = [(float(value), case) for value, case in zip(channel, cases, strict=True) if value > 0]
        if not known:
            continue
        (low, narrow), (high, wide) = min(known), max(known)
        found = UnevenScales(site, narrow, wide, (low, high), len(cases))
        if found.ratio >= WILD and (worst is None or found.ratio > worst.ratio):
            worst = found
    return worst


def uneven_sites(sites: Iterable[SiteFolder]) -> dict[str, UnevenScales]:
    """The sites whose volumes have different scales, by name; sites that cannot be read are left out."""
    found = {}
    for site in sites:
        with suppress(DataError):  # it is told where the site is asked for its images
            if (scales := find_uneven_scales(site)) is not None:
                found[site.name] = scales
    return found


def _ranges(image: torch.Tensor) -> torch.Tensor:
    """The ranges of the channels, (C,): 1st to 99th percentile, or all if nearly all voxels are equal."""
    voxels = image.flatten(1).float()
    low, high = torch.aminmax(voxels, dim=1)
    some = voxels[:, :: max(1, voxels.shape[1] // _VOXELS)]
    bottom, top = torch.quantile(some, torch.tensor([0.01, 0.99]), dim=1)
    return torch.where(top > bottom, top - bottom, high - low)
