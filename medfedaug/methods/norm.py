"""Conventional normalisation, with which FedRDN is compared."""

from collections.abc import Sequence

from monai.transforms import Transform
from monai.utils import CommonKeys as Keys

from medfedaug.methods.arguments import Over
from medfedaug.methods.base import Method, SiteContext, SitePart
from medfedaug.transforms import FedRDNd


class Norm(Method):
    """Every site normalises with its own statistics, in training and at test: "+ norm" of the FedRDN paper.

    x̂ = (x − μₖ)/σₖ (FedRDN Eq. 4) with the channel statistics of the site's own training images. Nothing is
    exchanged.

    Args:
        over: see `medfedaug.methods.fedrdn.FedRDN`.

    Deviations:
        The paper only says "experiential or statistical values"; these are the values of FedRDN at test time,
        so that the two methods differ only in training.
    """

    name = "norm"
    provides = frozenset({"normalised_input"})
    excludes = frozenset({"normalised_input"})
    statistics_over: str = "image"

    def __init__(self, over: Over = "image") -> None:
        self.statistics_over = over

    def at_site(self, context: SiteContext) -> SitePart:
        return _NormSite(context, self.statistics_over)


class _NormSite(SitePart):
    uses_unsent_statistics = True

    def __init__(self, context: SiteContext, over: str) -> None:
        self.context, self.over = context, over

    def transforms(self, *, training: bool) -> Sequence[Transform]:
        name = self.context.name
        return [FedRDNd(keys=Keys.IMAGE, statistics={name: self.context.statistics(self.over)}, site=name)]
