"""The sites of a round, their weights, and the number of good updates that it needs."""

from collections.abc import Collection, Mapping

from medfedaug.config.run import MAX_SHARE, Execution, RunConfig
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.functional.means import capped_weights

LEAST_SITES = 3  # least number of sites whose values or shares can be compared with one another


def site_weight(config: RunConfig, samples: int) -> float:
    """Return the weight of a site in the mean, before capping."""
    return float(samples) if config.weighting == "samples" else 1.0


def lowered_shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the sites whose weight is lowered, with their share of the sum before and after."""
    total, total_after = sum(before.values()), sum(after.values())
    return {s: (before[s] / total, after[s] / total_after) for s in before if after[s] < before[s]}


class Participation:
    """The sites of a round, their weights, and the number of good updates that it needs."""

    def __init__(self, config: RunConfig, execution: Execution) -> None:
        self.config, self.execution = config, execution
        self.least = 1
        self.capped = True
        """Flag: the server lowers shares; where it learns only sums, the sites do."""

    def weight(self, samples: int) -> float:
        """See `site_weight`."""
        return site_weight(self.config, samples)

    def weights(self, sites: Mapping[str, int]) -> dict[str, float]:
        """Return the capped weights of sites, by their numbers of samples, if all of them answer."""
        weights = {site: self.weight(n) for site, n in sites.items()}
        return capped_weights(weights, self.largest_share(len(sites)))

    def lowered(self, sites: Mapping[str, int]) -> dict[str, tuple[float, float]]:
        """Return the sites with a lowered share if all of them answer, with the share before and after."""
        return lowered_shares({site: self.weight(n) for site, n in sites.items()}, self.weights(sites))

    def largest_share(self, sites: int) -> float | None:
        """Return the largest share of one of so many training sites; ``None`` for no limit."""
        share = self.config.max_share
        # The default would weigh two sites alike: it applies from three sites on.
        unlimited = share == MAX_SHARE and sites < LEAST_SITES
        return None if unlimited or share == 1 or not self.capped else share

    def needed(self, sites: int) -> int:
        """Return the number of good updates that a round needs: ``min_sites``, or all of the round."""
        return max(self.execution.min_sites or self.config.buffer or sites, self.least)

    def check(self, sites: Collection[str], left_out: Mapping[str, str]) -> None:
        """Check that enough sites can train."""
        reasons = "; ".join(reason for _, reason in sorted(left_out.items()))
        min_sites = self.execution.min_sites
        if left_out and not min_sites:
            raise RunFailed(f"every site has to train, unless min_sites says how many suffice: {reasons}")
        needed = max(2, min_sites, self.least)
        if len(sites) < needed:
            who = "the method" if needed == self.least else "the federation"
            text = f"{len(sites)} of the sites can train; {who} needs {needed}"
            raise RunFailed(text + (f" ({reasons})" if reasons else ""))
        buffer, least = self.config.buffer, max(min_sites, self.least)
        if buffer and not least <= buffer <= len(sites):
            raise ConfigError(
                f"buffer is {buffer}: a round needs {least} updates (min_sites, or the method), and "
                f"{len(sites)} sites can train"
            )
