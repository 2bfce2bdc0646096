"""Choose the sites of a round, and the number of good updates that it needs."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from medfedaug.config.run import MAX_SHARE, Execution, RunConfig, derive_seed
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.functional.weighted_mean import capped_weights

LEAST_SITES = 3
"""With fewer sites no site's values or share can be compared with those of the others."""


def site_weight(config: RunConfig, samples: int) -> float:
    """The weight in the mean of a site with this number of samples, before it is capped."""
    return float(samples) if config.weighting == "samples" else 1.0


class Participation:
    """The sites of a round.

    Args:
        config: the share of the sites that take part in a round, and the seed of the draw.
        execution: the least number of good updates.
    """

    def __init__(self, config: RunConfig, execution: Execution) -> None:
        self.config, self.execution = config, execution
        self.least = 1

    def weight(self, samples: int) -> float:
        """See `site_weight`."""
        return site_weight(self.config, samples)

    def weights(self, sites: Mapping[str, int]) -> dict[str, float]:
        """The weights of sites by name, of their numbers of samples, as they are if all of them answer."""
        weights = {site: self.weight(n) for site, n in sites.items()}
        return capped_weights(weights, self.largest_share(len(sites)))

    def lowered(self, sites: Mapping[str, int]) -> dict[str, tuple[float, float]]:
        """The sites whose share is lowered if all of them answer, with the share before and after."""
        plain, used = {site: self.weight(n) for site, n in sites.items()}, self.weights(sites)
        total, all_used = sum(plain.values()), sum(used.values())
        return {s: (plain[s] / total, used[s] / all_used) for s in plain if used[s] < plain[s]}

    def largest_share(self, sites: int) -> float | None:
        """The largest share that one of this number of training sites may have; ``None`` for no limit."""
        share = self.config.max_share
        # Of two sites one has a half: only a limit that somebody asked for makes them alike.
        few = share == MAX_SHARE and sites < LEAST_SITES
        return None if few or share == 1 or self.config.secure_aggregation else share

    def round_size(self, sites: int) -> int:
        """Return the number of updates that a round takes, of a number of training sites."""
        return self.config.buffer or max(1, round(self.config.participation * sites))

    def needed(self, sites: int) -> int:
        """The number of good updates that a round needs: ``min_sites``, or all that a round takes."""
        return max(self.execution.min_sites or self.round_size(sites), self.least)

    def choose(self, available: Sequence[str], sites: int, round_: int) -> list[str]:
        """The sites that a round asks: all that are available, or a share drawn by seed and round.

        A buffered round asks all that are available, since the first updates that come make it.
        """
        size = self.round_size(sites)
        if len(available) <= size or self.config.buffer:
            return list(available)
        generator = random.Random(derive_seed(self.config.seed, "participation", round_))
        return sorted(generator.sample(available, size))

    def check(self, sites: Collection[str], left_out: Mapping[str, str]) -> None:
        """Check that enough sites can train."""
        reasons = "; ".join(f"{reason}" for _, reason in sorted(left_out.items()))
        min_sites = self.execution.min_sites
        if left_out and not min_sites:
            raise RunFailed(f"every site is needed, since min_sites is 0: {reasons}")
        needed = max(2, min_sites, self.least)
        if len(sites) < needed:
            who = "the method" if needed == self.least else "the federation"
            text = f"{len(sites)} of the sites can train; {who} needs {needed}"
            raise RunFailed(text + (f" ({reasons})" if reasons else ""))
        asked = self.round_size(len(sites))
        if asked > len(sites):
            raise ConfigError(f"buffer is {asked}, and {len(sites)} sites can train: take fewer updates")
        if self.needed(len(sites)) > asked:
            needs = (
                f"min_sites is {min_sites}" if min_sites >= self.least else f"the method needs {self.least}"
            )
            share = f"participation {self.config.participation}"
            how = f"buffer {asked}" if self.config.buffer else share
            raise ConfigError(f"{needs}, and with {how} a round takes {asked} updates of {len(sites)} sites")
