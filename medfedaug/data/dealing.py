"""Deal the data of published sites, such as the domains of PACS, to further sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from medfedaug.config.run import derive_seed
from medfedaug.data.base import SPLITS, Case, SiteFolder
from medfedaug.data.splits import deal_by_dirichlet, shuffled
from medfedaug.errors import ConfigError


def deal_sites(sites: Sequence[SiteFolder], clients: int, alpha: float, domains: int) -> list[SiteFolder]:
    """Deal each site's cases to ``clients`` new sites, or to new sites with cases of several sites.

    A case stays in its split, and the deal depends on the sites' names alone. Sites that do not train follow
    unchanged.

    Args:
        sites: each with the cases of one domain.
        clients: number of new sites for each site.
        alpha: 0 deals every class of every split evenly; above 0 each new site has random class proportions
            (`medfedaug.data.splits.deal_by_dirichlet`).
        domains: number of sites whose cases a new site has: the site and its successors, in a circle. Each
            site's cases are dealt to ``clients * domains`` new sites.

    Raises:
        ConfigError: for numbers outside their ranges.
        DataError: where a new site lacks a split.
    """
    trained = [site for site in sites if site.trains]
    if clients < 1 or not 1 <= domains <= max(1, len(trained)) or alpha < 0:
        raise ConfigError(
            f"deal {clients}, deal_alpha {alpha:g} and deal_domains {domains}: at least 1, at least 0, and "
            f"from 1 to {len(trained)} are needed"
        )
    if clients == domains == 1:
        return list(sites)
    parts = {site.name: _deal(site, clients * domains, alpha) for site in trained}
    width, dealt = len(str(clients - 1)), []
    for place, site in enumerate(trained):
        names = [trained[(place + k) % len(trained)].name for k in range(domains)]
        for number in range(clients):
            cases: dict[str, list[Case]] = {split: [] for split in SPLITS}
            for k, name in enumerate(names):
                for split, case in parts[name][number * domains + k]:
                    cases[split].append(replace(case, name=f"{name}/{case.name}") if domains > 1 else case)
            name = "_".join([*names, *([f"{number:0{width}d}"] if clients > 1 else [])])
            splits = {split: tuple(listed) for split, listed in cases.items()}
            dealt.append(replace(site, name=name, cases=splits))
            dealt[-1].check_splits()
    return [*dealt, *(site for site in sites if not site.trains)]


def _deal(site: SiteFolder, parts: int, alpha: float) -> list[list[tuple[str, Case]]]:
    """Deal a site's cases, each with the name of its split."""
    cases = [(split, case) for split in SPLITS for case in site.cases[split]]
    if alpha:
        _, labels = np.unique([str(case.label) for _, case in cases], return_inverse=True)
        dealt = deal_by_dirichlet(labels, parts, alpha, derive_seed("deal", site.name))
        return [[cases[i] for i in indices] for indices in dealt]
    order = shuffled(cases, "deal", site.name)
    order.sort(key=lambda entry: (SPLITS.index(entry[0]), str(entry[1].label)))
    return [order[part::parts] for part in range(parts)]
