"""Multi-Krum: the mean of the models with which most others agree."""

from __future__ import annotations

from medfedaug.methods.arguments import AtLeastOne, Count
from medfedaug.methods.krum import Krum


class MultiKrum(Krum):
    """The mean of the m models with the smallest scores of Krum (Blanchard et al., NeurIPS 2017).

        w ← (1/m) Σ wᵢ over the m sites with the smallest s(i), s as in `medfedaug.methods.krum.Krum`.

    m = 1 is Krum. A round needs at least 2f + 3 and m + f updates.

    Numbers of samples: not used; every chosen site counts as one.

    Args:
        hostile: f, the largest number of hostile sites in a round.
        keep: m; 0 for all sites of the round but f.

    Raises:
        ConfigError: for f below 1 or m below 0, or when no parameter is averaged.

    Deviations:
        As for Krum. The default of m is our choice.
    """

    name = "multi_krum"

    def __init__(self, hostile: AtLeastOne = 1, keep: Count = 0) -> None:
        self.hostile, self.keep = hostile, keep
