"""Multi-Krum: the mean of the models with which most others agree."""

from __future__ import annotations

from medfedaug.errors import ConfigError
from medfedaug.methods.base import Aggregator, Method, ServerContext
from medfedaug.methods.kept import check_hostile
from medfedaug.methods.krum import KrumServer


class MultiKrum(Method):
    """The mean of the m models with the smallest scores of Krum (Blanchard et al., NeurIPS 2017).

        w ← (1/m) Σ wᵢ over the m sites with the smallest s(i), s as in `medfedaug.methods.krum.Krum`.

    m = 1 is Krum. A round needs 2f + 3 updates, and m + f.

    Numbers of samples: not used; every chosen site counts as one.

    Args:
        hostile: f, at most so many sites of a round may be hostile.
        keep: m; 0 for all sites of the round but f.

    Raises:
        ConfigError: for f below 1 or m below 0, or where no parameter is averaged.

    Deviations:
        Those of Krum. The default of m is ours.
    """

    name = "multi_krum"
    requires = frozenset({"averaged_parameters"})

    def __init__(self, hostile: int = 1, keep: int = 0) -> None:
        check_hostile(self.name, hostile)
        if keep < 0:
            raise ConfigError(f"multi_krum: keep is a number of sites, or 0 for all but f, got {keep}")
        self.hostile, self.keep = hostile, keep

    def aggregator(self, context: ServerContext) -> Aggregator:
        return KrumServer(context, self.name, self.hostile, self.keep)
