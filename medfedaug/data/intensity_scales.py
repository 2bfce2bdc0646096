"""Check whether the volumes of a site have comparable scales of intensity."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from medfedaug.data.base import SiteFolder, spread
from medfedaug.errors import DataError

WILD = 5.0
"""Ratio of ranges from which a site's volumes are uneven; the ratio in LGG is at most 1.7."""

_CASES = 20  # volumes of a site, evenly from its list
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
        """Return the ratio of the larger range to the smaller one."""
        return self.ranges[1] / self.ranges[0]

    def __str__(self) -> str:
        low, high = self.ranges
        return f"{self.narrow} covers {low:.3g}, {self.wide} {high:.3g}, {self.ratio:.3g} times as much"

    def sentence(self, intensity: str = "raw") -> str:
        """Return the finding and the remedy for ``"raw"``, ``"scale"`` or a plan's ``"z_score"``."""
        finding = f"{self.site}: its volumes lie on wildly different scales of intensity ({self})"
        if intensity == "scale":
            return f"{finding}; --intensity scale, as here, brings each to [0, 1]."
        if intensity == "z_score":
            return f"{finding}; the plan's normalisation brings each to mean 0 and deviation 1."
        return f"{finding}. Statistics of them all fit none of them: use --intensity scale."


def find_uneven_scales(site: SiteFolder) -> UnevenScales | None:
    """Return the most different volumes of a site, if their ranges differ by a factor of `WILD` or more.

    The range of a volume runs from its 1st to its 99th percentile, without hot voxels and the metal in a CT.
    The most different of several channels counts.
    """
    if site.scaling == "fixed":
        return None
    cases = spread(site.cases["training"] or site.cases["test"], _CASES)
    ranges = torch.stack([_ranges(site.load_image(case)) for case in cases])  # (cases, C)
    return most_uneven(site.name, [case.name for case in cases], ranges.tolist())


def most_uneven(site: str, cases: Sequence[str], ranges: Sequence[Sequence[float]]) -> UnevenScales | None:
    """Return the two volumes whose ranges differ most, if by a factor of `WILD` or more."""
    uneven = []
    for channel in zip(*ranges, strict=True):
        # A constant channel, such as a missing sequence, has no scale.
        positive = [(float(value), case) for value, case in zip(channel, cases, strict=True) if value > 0]
        if positive:
            (low, narrow), (high, wide) = min(positive), max(positive)
            uneven.append(UnevenScales(site, narrow, wide, (low, high), len(cases)))
    worst = max(uneven, key=lambda scales: scales.ratio, default=None)
    return worst if worst is not None and worst.ratio >= WILD else None


def uneven_sites(sites: Iterable[SiteFolder]) -> dict[str, UnevenScales]:
    """Return the uneven scales of sites by name; skip sites that cannot be read."""
    uneven = {}
    for site in sites:
        with suppress(DataError):  # a run raises it when it reads the site's images
            if (scales := find_uneven_scales(site)) is not None:
                uneven[site.name] = scales
    return uneven


def _ranges(image: torch.Tensor) -> torch.Tensor:
    """Return the channels' ranges, (C,): 1st to 99th percentile, or all if nearly all voxels are equal."""
    voxels = image.flatten(1).float()
    low, high = torch.aminmax(voxels, dim=1)
    sample = voxels[:, :: max(1, voxels.shape[1] // _VOXELS)]
    bottom, top = torch.quantile(sample, torch.tensor([0.01, 0.99]), dim=1)
    return torch.where(top > bottom, top - bottom, high - low)
