"""`odd_sites` names the sites of a federation that differ from the others, and in what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_LEVEL = 0.05
"""Largest rate of federations of alike sites in which a site is named."""


@dataclass(frozen=True)
class Measure:
    """A number of each patient, by site.

    Attributes:
        what: its name, or of a sign the structure that is brighter or darker than the background.
        by_site: one value for each patient.
        sign: whether only the sign counts.
    """

    what: str
    by_site: Mapping[str, np.ndarray]
    sign: bool = False


@dataclass(frozen=True)
class OddSite:
    """A site that differs from the others in a measure, by more than chance.

    Attributes:
        others: those that it differs from, as text.
        text: the numbers of the site and of the others.
    """

    site: str
    others: str
    what: str
    text: str

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
