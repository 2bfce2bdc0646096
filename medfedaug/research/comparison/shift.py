"""`site_shift`: the distance between sites' images; `odd_sites` names the sites that differ, and in what."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np

_CHANCE = 1.5  # times the shift by chance; below it, sites do not differ


@dataclass(frozen=True)
class PairShift:
    """Distance between two sites."""

    sites: tuple[str, str]
    statistics: float  # distance of the means of their images' pairs (mean, standard deviation)
    chance: float  # expected `statistics` of sites that do not differ


@dataclass(frozen=True)
class Shift:
    """Distances between the sites of a federation."""

    pairs: tuple[PairShift, ...]

    @property
    def shift(self) -> float:
        """Mean of `PairShift.statistics` over all pairs of sites."""
        return fmean(pair.statistics for pair in self.pairs)

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


def site_shift(pairs: Mapping[str, np.ndarray]) -> Shift | None:
    """Measure the distance between the sites' images, in units of the distance within a site.

    Image i of site k has the pair ``pₖᵢ = (μₖᵢ, σₖᵢ)``, mean and standard deviation of every
    channel (FedRDN Eq. 5-6), a vector with 2C components d. With the sites' means p̄ₖ and the standard
    deviation within a site, the same for all sites, ::

        s_d² = (Σₖ Σᵢ (p_kid − p̄_kd)²) / (Σₖ (nₖ − 1)),
        Dⱼₖ = √((1/(2C)) Σ_d (p̄_jd − p̄_kd)² / s_d²)

    is the distance of two sites' statistics: 1 means a distance of one standard deviation of the images
    within a site. If the sites do not differ, Dⱼₖ² is ``1 / nⱼ + 1 / nₖ`` on
    average, the square of ``chance``. **The shift of a federation is the mean of D over all pairs of sites.**
    Components that vary within no site, and channels that one of the two sites lacks, are left out.

    Args:
        pairs: by site, mean and standard deviation of each channel of each image, (N, C, 2); NaN in a channel
            that a site does not have.

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
    shifts = []
    for one, other in combinations(names, 2):
        apart = means[one] - means[other]
        used = (within > 0) & ~np.isnan(apart)
        apart = apart[used] / within[used]
        if len(apart):
            shifts.append(
                PairShift(
                    sites=(one, other),
                    statistics=float(np.sqrt(np.mean(apart**2))),
                    chance=math.sqrt(1 / len(points[one]) + 1 / len(points[other])),
                )
            )
    return Shift(tuple(shifts)) if shifts else None


def _within(points: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the standard deviation within a site, by component; 0 where no site varies."""
    squares, freedom = np.zeros(1), np.zeros(1)
    for values in points.values():
        present = ~np.isnan(values).any(axis=0)
        squares = squares + np.where(present, ((values - values.mean(axis=0)) ** 2).sum(axis=0), 0)
        freedom = freedom + np.where(present, len(values) - 1, 0)
    return np.sqrt(squares / np.maximum(freedom, 1))


_LEVEL = 0.05  # largest rate of federations of alike sites in which a site is named


@dataclass(frozen=True)
class Measure:
    """A number of each patient, by site."""

    what: str  # its name, or of a sign the structure that is brighter or darker than the background
    by_site: Mapping[str, np.ndarray]  # one value for each patient
    sign: bool = False  # whether only the sign counts


@dataclass(frozen=True)
class OddSite:
    """A site that differs from the others in a measure, by more than chance."""

    site: str
    others: str  # those that it differs from, as text
    what: str
    text: str  # the numbers of the site and of the others

    def __str__(self) -> str:
        return f"{self.site} differs from {self.others}: {self.text}."


def odd_sites(measures: Sequence[Measure]) -> list[OddSite]:
    """Return the sites that differ from the others, at most one for each measure.

    Each site is compared with all others together: values by the Mann-Whitney test, signs by Fisher's exact
    test. A site is named if its p is below 0.05 over the number of all comparisons (Bonferroni), so that at
    most 5% of federations of alike sites name one. A reversed sign is named only where most patients of the
    site have one sign and most of the others have the other one.

    Example:
        >>> bright, dark = np.full(9, 0.2), np.full(9, -0.2)
        >>> print(*odd_sites([Measure("lesion", {"A": bright, "B": bright, "C": dark}, sign=True)]))
        C differs from the others: lesion darker than the background in 9 of 9 patients, elsewhere in 0 of 18.
    """
    known = [
        Measure(one.what, {s: v[~np.isnan(v)] for s, v in one.by_site.items()}, one.sign) for one in measures
    ]
    compared = [
        (one, site, values, np.concatenate([v for s, v in one.by_site.items() if s != site]))
        for one in known
        for site, values in list(one.by_site.items())[int(len(one.by_site) == 2) :]  # two make one comparison
        if len(one.by_site) > 1
    ]
    compared = [entry for entry in compared if min(len(entry[2]), len(entry[3])) > 1]
    lowest: dict[str, tuple[float, OddSite]] = {}
    for one, site, own, others in compared:
        p, text = _signs(one.what, own, others) if one.sign else _values(one.what, own, others)
        if p < _LEVEL / len(compared) and p < lowest.get(one.what, (1.0,))[0]:
            others_text = "the others" if len(one.by_site) > 2 else next(iter(one.by_site))
            lowest[one.what] = p, OddSite(site, others_text, one.what, text)
    return [found for _, found in lowest.values()]


def _values(what: str, own: np.ndarray, others: np.ndarray) -> tuple[float, str]:
    from scipy.stats import mannwhitneyu  # takes a while

    text = f"{what}: {np.median(own):.3g} in the median patient, elsewhere {np.median(others):.3g}"
    return float(mannwhitneyu(own, others).pvalue), text


def _signs(what: str, own: np.ndarray, others: np.ndarray) -> tuple[float, str]:
    from scipy.stats import fisher_exact

    dark, dark_elsewhere = int((own < 0).sum()), int((others < 0).sum())
    word, here, elsewhere = "darker", dark, dark_elsewhere
    if 2 * dark < len(own):
        word, here, elsewhere = "brighter", len(own) - dark, len(others) - dark_elsewhere
    text = f"{what} {word} than the background in {here} of {len(own)} patients"
    text += f", elsewhere in {elsewhere} of {len(others)}"
    if 2 * here <= len(own) or 2 * elsewhere >= len(others):
        return 1.0, text
    table = [[here, len(own) - here], [elsewhere, len(others) - elsewhere]]
    return float(fisher_exact(table).pvalue), text
