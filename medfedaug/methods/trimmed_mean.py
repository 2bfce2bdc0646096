"""The coordinate-wise trimmed mean of the sites' models."""

from torch import Tensor

from medfedaug import functional as F
from medfedaug.methods.arguments import AtLeastOne
from medfedaug.methods.base import Aggregator, Method, RoundMean, ServerContext
from medfedaug.methods.exchanges import KeptUpdates, stacked


class TrimmedMean(Method):
    """The coordinate-wise trimmed mean (Yin et al., ICML 2018, Algorithm 1, option II).

        w[j] ← mean of the wₖ[j] without the f largest and the f smallest,

    which lies within the range of the honest sites in every coordinate if at most f sites of a round are
    hostile. A round needs 2f + 1 updates.

    Numbers of samples: not used; every site counts as one.

    Args:
        hostile: f, the number of values left out at each end; the paper's β is f/n.

    Deviations:
        The paper trims gradients at one common point, this method models after local training. Running
        statistics of norm layers are trimmed too.
    """

    name = "trimmed_mean"

    def __init__(self, hostile: AtLeastOne = 1) -> None:
        self.hostile = hostile

    def aggregator(self, context: ServerContext) -> Aggregator:
        return TrimmedMeanServer(self.hostile)


class TrimmedMeanServer(KeptUpdates):
    def __init__(self, hostile: int) -> None:
        super().__init__()
        self.hostile, self.min_updates = hostile, 2 * hostile + 1

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        models = self.take()
        return {key: F.trimmed_mean(stacked(models, key), self.hostile).float() for key in round_.mean}
