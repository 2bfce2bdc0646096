"""The coordinate-wise median of the sites' models."""

from torch import Tensor

from medfedaug import functional as F
from medfedaug.methods.base import Aggregator, Method, RoundMean, ServerContext
from medfedaug.methods.exchanges import KeptUpdates, stacked


class Median(Method):
    """The coordinate-wise median (Yin et al., ICML 2018, Algorithm 1, option I).

        w[j] ← median over the sites k of wₖ[j],

    which lies between values of honest sites in every coordinate if fewer than half of the sites of a round
    are hostile: f < n/2. A round needs 3 updates.

    Numbers of samples: not used; every site counts as one.

    Deviations:
        The paper takes the median of gradients at one common point, for machines with equal numbers of
        samples from one distribution. Here it is the median of models after local training, which differs
        from the mean even without hostile sites, the more the sites differ. Running statistics of norm layers
        become their median too.
    """

    name = "median"

    def aggregator(self, context: ServerContext) -> Aggregator:
        return MedianServer()


class MedianServer(KeptUpdates):
    min_updates = 3

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        models = self.take()
        return {key: F.coordinate_median(stacked(models, key)).float() for key in round_.mean}
