"""FedRDN: each training image is normalised with the statistics of a random site."""

from collections.abc import Sequence

import torch
from monai.transforms import Transform
from monai.utils import CommonKeys as Keys
from torch import Tensor

from medfedaug.config.kinds import INTENSITY_MEAN, INTENSITY_STD
from medfedaug.methods.arguments import Over
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Bounds, Contributions, Payload, ServerContext, SiteContext
from medfedaug.methods.exchanges import GatheredServer
from medfedaug.statistics import ChannelStatistics, usable_pairs
from medfedaug.transforms import FedRDNd


class FedRDN(Method):
    """Federated random data normalisation.

    Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning". Before
    training each site sends its channel statistics (μₖ, σₖ) of Eq. 5-6, and receives all sites' pairs. In
    training a random pair normalises an image, x̂ = (x − μʲ)/σʲ (Eq. 7); in evaluation the site's own does
    (Eq. 8). A site outside of the exchange computes its own statistics, without training.

    Args:
        average: use the average of all sites' pairs in training and at test: FedRDN-V of the paper's Table 4.
        over: ``"image"``: statistics of whole images, as in the paper. ``"foreground"``: of the voxels
            brighter than the darkest one of their image, for volumes that are mostly air; they normalise all
            voxels.

    Exchange, once: ``mean`` (C,), ``std`` (C,) and ``count`` (1,) up; the same for every site down.

    Deviations:
        Eq. 5 prints a sum instead of the mean over images. The statistics are over whole volumes, even if the
        network uses slices, so that the number of slices does not weight patients. The draw is per image and
        call, with both halves of the pair from the same site; the public code draws mean and standard
        deviation from different sites, once per batch.

        The paper divides by σ and does not mention a channel that is constant at a site, because its device
        does not record it or the site does not acquire a sequence. Here such a channel is 0 after
        normalisation at that site, in training and at test, and a site that draws the pair uses the average
        of the other sites' for this channel (`medfedaug.statistics.usable_pairs`).
    """

    name = "fedrdn"
    provides = frozenset({"normalised_input"})
    excludes = frozenset({"normalised_input"})
    statistics_over: str = "image"

    def __init__(self, average: bool = False, over: Over = "image") -> None:
        self.average, self.statistics_over = average, over

    def at_site(self, context: SiteContext) -> SitePart:
        return FedRDNSite(context, self.average, self.statistics_over)

    def before_training(self, context: ServerContext) -> ServerExchange:
        return FedRDNServer(context.in_channels, self.average)


class FedRDNSite(SitePart, SiteExchange):
    def __init__(self, context: SiteContext, average: bool = False, over: str = "image") -> None:
        self.context, self.average, self.over = context, average, over
        self.pairs: dict[str, ChannelStatistics] = {}
        self.sent: ChannelStatistics | None = None
        self.before_training = self

    def collect(self) -> Payload:
        """Return μₖ and σₖ, (C,) each, and the number of images."""
        own, of_all = self.context.statistics(self.over), self.context.census.of_all
        return {
            "mean": of_all(own.mean),
            "std": of_all(own.std),
            "count": of_all(torch.tensor([float(own.count)])),
        }

    def contributions(self, bounds: Bounds) -> Contributions:
        """Return μᵢ and σᵢ of each image: Eq. 5 is their mean."""
        kinds = {"mean": INTENSITY_MEAN, "std": INTENSITY_STD}
        return Contributions(kinds, self.context.case_moments(self.over))

    def privatised(self, means: Payload, cases: int) -> Payload:
        """Return the noisy pair, which also becomes the site's own, and the number of images.

        The pair of a missing channel is 0: the site lists missing channels, which reveals no patient's image.
        """
        pair = {key: value.clone() for key, value in means.items()}
        for value in pair.values():
            value[[*self.context.missing_channels]] = 0
        self.sent = ChannelStatistics(pair["mean"], pair["std"], cases)
        return {**pair, "count": torch.tensor([float(cases)])}

    def check(self, payload: Payload) -> None:
        for site, pair in _pairs(payload).items():
            pair.validate(site)

    def apply(self, payload: Payload) -> None:
        self.pairs = _pairs(payload)

    def transforms(self, *, training: bool) -> Sequence[Transform]:
        """Return the normalisation: a random pair in training, the site's in evaluation, or the average."""
        own = self.pairs.get(self.context.name) or self.sent or self.context.statistics(self.over)
        pairs = usable_pairs(self.pairs, own)
        if self.average and pairs:
            return [FedRDNd(keys=Keys.IMAGE, statistics=pairs, average=True)]
        if training:
            return [FedRDNd(keys=Keys.IMAGE, statistics=pairs)]
        return [FedRDNd(keys=Keys.IMAGE, statistics={self.context.name: own}, site=self.context.name)]


class FedRDNServer(GatheredServer):
    """The server's half: the list of pairs, 2C + 1 numbers per site.

    With ``average`` inference needs all pairs, and not only the site's own.
    """

    def __init__(self, in_channels: int, average: bool = False) -> None:
        super().__init__({"mean": (in_channels,), "std": (in_channels,), "count": (1,)})
        self.kinds = {"mean": INTENSITY_MEAN, "std": INTENSITY_STD}
        self.needed_at_inference = average

    def check(self, payload: Payload) -> None:
        _statistics(payload["mean"], payload["std"], payload["count"]).validate()

    def channel_statistics(self) -> dict[str, ChannelStatistics]:
        return _pairs(self.result())


def _pairs(payload: Payload) -> dict[str, ChannelStatistics]:
    sites = sorted(key.removeprefix("mean/") for key in payload if key.startswith("mean/"))
    return {
        site: _statistics(payload[f"mean/{site}"], payload[f"std/{site}"], payload[f"count/{site}"])
        for site in sites
    }


def _statistics(mean: Tensor, std: Tensor, count: Tensor) -> ChannelStatistics:
    return ChannelStatistics(mean=mean, std=std, count=int(count))
