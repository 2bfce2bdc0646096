"""`site_shift`: the distance between sites' images, in units of the distance within a site."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np

_CHANCE = 1.5  # times the shift by chance; below it, sites do not differ


@dataclass(frozen=True)
class PairShift:
    """Distance between two sites.

    Attributes:
        statistics: distance of the means of their images' pairs (mean, deviation).
        histogram: distance of their histograms; ``None`` if the images within a site do not vary.
        chance: expected `statistics` of sites that do not differ.
    """

    sites: tuple[str, str]
    statistics: float
    histogram: float | None
    chance: float


@dataclass(frozen=True)
class Shift:
    """Distances between the sites of a federation."""

    pairs: tuple[PairShift, ...]

    @property
    def shift(self) -> float:
        """Mean of `PairShift.statistics` over all pairs of sites."""
        return fmean(pair.statistics for pair in self.pairs)

    @property
    def by_site(self) -> dict[str, float]:
        """Mean distance of each site from the others: of `PairShift.statistics` over its pairs."""
        names = sorted({site for pair in self.pairs for site in pair.sites})
        return {name: fmean(p.statistics for p in self.pairs if name in p.sites) for name in names}

    @property
    def histogram(self) -> float | None:
        """Mean of `PairShift.histogram` over all pairs of sites."""
        known = [pair.histogram for pair in self.pairs if pair.histogram is not None]
        return fmean(known) if known else None

    @property
    def chance(self) -> float:
        """Mean of `PairShift.chance` over all pairs of sites."""
        return fmean(pair.chance for pair in self.pairs)

    @property
    def sentence(self) -> str:
        """The shift in words: a mean over all pairs, which says nothing of a single site."""
        if self.shift < _CHANCE * self.chance:
            meaning = "in the mean of all pairs the sites' intensities do not differ by more than chance"
        elif self.shift < 1:
            meaning = "the sites' intensities differ by less than the images of one site do"
        else:
            meaning = "the sites' intensities differ by more than the images of one site do"
        return f"shift {self.shift:.2f}, where chance alone would give {self.chance:.2f}: {meaning}."


def site_shift(pairs: Mapping[str, np.ndarray], quantiles: Mapping[str, np.ndarray]) -> Shift | None:
    """Measure the distance between the sites' images, in units of the distance within a site.

    Image i of site k has the pair ``pₖᵢ = (μₖᵢ, σₖᵢ)``, mean and deviation of every
    channel (FedRDN Eq. 5-6), a vector with 2C components d. With the sites' means p̄ₖ and the
    deviation within a site, the same for all sites, ::

        s_d² = (Σₖ Σᵢ (p_kid − p̄_kd)²) / (Σₖ (nₖ − 1)),
        Dⱼₖ = √((1/(2C)) Σ_d (p̄_jd − p̄_kd)² / s_d²)

    is the distance of two sites' statistics: 1 means that they lie one standard deviation of the images
    within a site apart. If the sites do not differ, Dⱼₖ² is ``1 / nⱼ + 1 / nₖ`` on
    average, the square of ``chance``. **The shift of a federation is the mean of D over all pairs of sites.**

    With ``W_c`` the 1-Wasserstein distance between distributions of the intensities of channel c, of an
    image, hₖᵢ, and of all images of a site in equal parts, hₖ, ::

        Hⱼₖ = (1/C) Σ_c W_c(hⱼ, hₖ)/w_c,   w_c = (1/M) Σₖ (1/nₖ) Σᵢ W_c(hₖᵢ, hₖ),
        W(g, h) = (1/Q) Σ_q |G⁻¹(q) − H⁻¹(q)|

    is the distance of their histograms: 1 means that they lie as far apart as an image from its own site.
    Both leave out components that vary within no site, and channels that one of the two sites lacks.

    Args:
        pairs: by site, mean and deviation of each channel of each image, (N, C, 2); NaN in a channel that a
            site does not have.
        quantiles: by site, evenly spaced quantiles of the intensities of each image, (N, C, Q); the same.

    Returns:
        ``None`` for fewer than two sites, for different numbers of channels, and if no two sites have a
        common channel that varies within a site.
    """
    names = sorted(site for site, values in pairs.items() if len(values))
    if len(names) < 2 or len({pairs[site].shape[1] for site in names}) > 1:
        return None
    points = {site: pairs[site].reshape(len(pairs[site]), -1).astype(np.float64) for site in names}
    within = _within(points)
    means = {site: values.mean(axis=0) for site, values in points.items()}
    whole = {site: _site_quantiles(quantiles[site]) for site in names}
    own = np.array([np.abs(quantiles[site] - whole[site]).mean(axis=(0, 2)) for site in names])
    present = ~np.isnan(own)
    spread = np.where(present, own, 0).sum(axis=0) / np.maximum(present.sum(axis=0), 1)
    shifts = []
    for one, other in combinations(names, 2):
        apart = _known((means[one] - means[other]), within)
        if len(apart):
            distances = _known(np.abs(whole[one] - whole[other]).mean(axis=1), spread)
            shifts.append(
                PairShift(
                    sites=(one, other),
                    statistics=float(np.sqrt(np.mean(apart**2))),
                    histogram=float(distances.mean()) if len(distances) else None,
                    chance=math.sqrt(1 / len(points[one]) + 1 / len(points[other])),
                )
            )
    return Shift(tuple(shifts)) if shifts else None


def _known(values: np.ndarray, yardstick: np.ndarray) -> np.ndarray:
    """Return values in units of a yardstick, for channels of both sites with a yardstick above 0."""
    used = (yardstick > 0) & ~np.isnan(values)
    return values[used] / yardstick[used]


def _within(points: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the deviation within a site, by component; 0 for a component that varies within no site."""
    squares, freedom = np.zeros(1), np.zeros(1)
    for values in points.values():
        present = ~np.isnan(values).any(axis=0)
        squares = squares + np.where(present, ((values - values.mean(axis=0)) ** 2).sum(axis=0), 0)
        freedom = freedom + np.where(present, len(values) - 1, 0)
    return np.sqrt(squares / np.maximum(freedom, 1))


def _site_quantiles(images: np.ndarray) -> np.ndarray:
    """Return the quantiles of all images in equal parts, (C, Q), from the quantiles of each, (N, C, Q)."""
    number = images.shape[2]
    together = images.transpose(1, 0, 2).reshape(images.shape[1], -1)
    return np.quantile(together, (np.arange(number) + 0.5) / number, axis=1).T
