"""Notes on the classes of sites that have annotated different ones: spellings, and classes of few sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import combinations

from medfedaug.data.base import SiteFolder, plain_name
from medfedaug.data.dataset_json import named_classes

_ALIKE = 0.75
"""Names with a ratio of `difflib` from here on may mean one structure."""


def annotation_notes(sites: Sequence[SiteFolder]) -> Iterator[tuple[str, str]]:
    """Yield a site and a note for each class that may be spelt in two ways, or that few sites have annotated.

    Args:
        sites: the sites of a federation, some of them partial.
    """
    named = {site.name: {plain_name(name): name for name in named_classes(site)} for site in sites}
    known = {site.name: {plain_name(name) for name in site.annotated()} for site in sites}
    first: dict[str, str] = {}
    for site, names in named.items():
        for plain in names:
            first.setdefault(plain, site)
    for one, other in combinations(first, 2):
        here, there = first[other], first[one]
        if here != there and _alike(one, other):  # a site tells its own classes apart
            theirs = named[there][one]
            reason = (
                f"its class {named[here][other]!r} may be the {theirs!r} of site {there}, and names decide: "
                f"where both are one structure, write {theirs!r} in labels and labelled"
            )
            yield here, reason
    for plain, site in first.items():
        having, name = [other for other, own in known.items() if plain in own], named[site][plain]
        if not having:
            reason = (
                f"no site has outlined {name!r}: nothing is learned of it, and the model never finds it; "
                "outline it at one site, or take it out of labels"
            )
            yield site, reason
        elif len(having) == 1 and len(sites) > 1:
            reason = (
                f"no other site has outlined {name!r}: it is learned and scored here alone, and how well it "
                "is found at the others is not known"
            )
            yield having[0], reason


def _alike(one: str, other: str) -> bool:
    """True of names of the same words in another order, or that differ by few letters."""
    words = sorted(one.split()) == sorted(other.split())
    return words or SequenceMatcher(None, one, other).ratio() >= _ALIKE
