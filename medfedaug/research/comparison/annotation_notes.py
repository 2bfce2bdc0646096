"""Notes on the classes of several sites: spellings, different lists, and classes of few sites."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import combinations

from medfedaug.data.base import SiteFolder, plain_name
from medfedaug.data.dataset_json import LABELLED, named_classes

_ALIKE = 0.75
"""Ratio of `difflib` from which two names may mean one structure."""


def annotation_notes(sites: Sequence[SiteFolder]) -> Iterator[tuple[str, str]]:
    """Yield a site and a note for each class that may have two names, or that few sites have annotated.

    Without partial sites, also for each site with other classes than the first.
    """
    sites = [site for site in sites if site.task == "segmentation"]
    named = {site.name: {plain_name(name): name for name in named_classes(site)} for site in sites}
    trained = {site.name: set(map(plain_name, site.annotated("training"))) for site in sites}
    tested = {site.name: set(map(plain_name, site.annotated("test"))) for site in sites}
    first: dict[str, str] = {}
    for site, names in named.items():
        for plain in names:
            first.setdefault(plain, site)
    for plain, other in combinations(first, 2):
        owner, site = first[plain], first[other]
        together = any(plain in names and other in names for names in named.values())
        if not together and _similar(plain, other):
            name = named[owner][plain]
            yield (
                site,
                f"its class {named[site][other]!r} may be the {name!r} of site {owner}, and names decide: "
                f"where both are one structure, write {name!r} in labels and labelled",
            )
    if not any(site.partial for site in sites):
        yield from _different_lists(named)
        return
    for plain, site in first.items():
        name = named[site][plain]
        trainers, testers = ([s for s, names in part.items() if plain in names] for part in (trained, tested))
        if not trainers:
            yield (
                site,
                f"no site has outlined {name!r}: nothing is learned of it, and the model never finds it; "
                "outline it at one site, or take it out of labels",
            )
        elif len(trainers) == 1 and len(sites) > 1:
            scored = f"it is scored at {', '.join(testers) or 'no site'}"
            unknown = ", and its score at other sites is not known" if len(testers) < len(sites) else ""
            yield trainers[0], f"no other site has outlined {name!r} for training: {scored}{unknown}"


def _different_lists(named: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield a site and a note where it names other classes than the first site; both name some."""
    lists = {site: names for site, names in named.items() if names}
    for site, names in [*lists.items()][1:]:
        owner, others = next(iter(lists.items()))
        if {*names} != {*others}:
            yield (
                site,
                f"its classes are {', '.join(names.values())}, and those of site {owner} are "
                f"{', '.join(others.values())}: where a site has not outlined a structure, list what it has "
                f"outlined under {LABELLED!r} in its dataset.json",
            )


def _similar(name: str, other: str) -> bool:
    """Return whether one name has all words of the other, or they differ by few letters."""
    words, others = set(name.split()), set(other.split())
    return words <= others or others <= words or SequenceMatcher(None, name, other).ratio() >= _ALIKE
