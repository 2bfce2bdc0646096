"""FedRDN: each training image is normalised with the statistics of a random site."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from monai.transforms import Transform
from monai.utils import CommonKeys as Keys
from torch import Tensor

from medfedaug.errors import warn
from medfedaug.methods.arguments import Over
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Bounds, Contributions, Payload, ServerContext, SiteContext
from medfedaug.methods.gathered import GatheredServer
from medfedaug.privacy.kinds import INTENSITY_MEAN, INTENSITY_STD
from medfedaug.statistics import ChannelStatistics, foreign_pairs, usable_pairs
from medfedaug.transforms import FedRDNd


class FedRDN(Method):
    """Federated random data normalisation.

    Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning". Before
    training each site sends its channel statistics (μₖ, σₖ) of Eq. 5-6, and receives all sites' pairs. In
    training an image is normalised by a pair drawn at random, x̂ = (x − μʲ)/σʲ (Eq. 7); at evaluation by the
    site's own (Eq. 8). A site that joined no exchange uses statistics that it computes itself, without
    training.

    Args:
        average: use the average of all sites' pairs, in training and at test, in place of a random and the
            own one: FedRDN-V of the paper's Table 4.
        over: ``"image"``: the statistics are those of whole images, as in the paper. ``"foreground"``: of the
            voxels brighter than the darkest one of their image, for volumes that are mostly air; all voxels
            are normalised with them.

    Exchange, once: ``mean`` (C,), ``std`` (C,) and ``count`` (1,) up; the same for every site down.

    Deviations:
        Eq. 5 prints a sum where the mean over images is meant. An image is a whole volume for the
        statistics, also where the network sees its slices: a site's number of slices then does not weigh
        its patients. The draw is per image and call, both halves of the pair from the same site; the
        public code draws mean and deviation from different sites, once per batch.

        The paper divides by σ and says nothing of a channel that is constant at a site, because its device
        does not record it or a sequence is not taken there. Here such a channel takes no part: it is 0
        after normalisation at that site, in training as at test, and who draws the site's pair takes the
        average of the other sites' for this channel (`medfedaug.statistics.usable_pairs`).
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
    """The site's half."""

    def __init__(self, context: SiteContext, average: bool = False, over: str = "image") -> None:
        self.context, self.average, self.over = context, average, over
        self.pairs: dict[str, ChannelStatistics] = {}
        self.sent: ChannelStatistics | None = None
        self.before_training = self

    def collect(self) -> Payload:
        """μₖ and σₖ, (C,) each, and the number of images."""
        own = self.context.statistics(self.over)
        return {"mean": own.mean, "std": own.std, "count": torch.tensor([float(own.count)])}

    def contributions(self, bounds: Bounds) -> Contributions:
        """μᵢ and σᵢ of each image: Eq. 5 is their mean."""
        kinds = {"mean": INTENSITY_MEAN, "std": INTENSITY_STD}
        return Contributions(kinds, self.context.case_moments(self.over))

    def privatised(self, means: Payload, cases: int) -> Payload:
        """The noisy pair, which the site uses as its own from now on, and the number of images.

        That a channel is missing is in the site's list and in no patient's image: there the pair stays 0.
        """
        pair = {key: value.clone() for key, value in means.items()}
        for value in pair.values():
            value[[*self.context.missing_channels]] = 0
        self.sent = ChannelStatistics(pair["mean"], pair["std"], cases)
        return {**pair, "count": torch.tensor([float(cases)])}

    def check(self, payload: Payload) -> None:
        """Deviations are divided by: that of a site is positive, but for channels that are constant there."""
        for site, pair in _pairs(payload).items():
            pair.validate(site)

    def apply(self, payload: Payload) -> None:
        self.pairs = _pairs(payload)
        met = [pair for pair in foreign_pairs(self.pairs) if self.context.name in pair.sites]
        if met and not self.average:
            warn(
                "images lie far from 0 under other sites' pairs, in deviations: "
                f"{'; '.join(map(str, met[:3]))}",
                site=self.context.name,
                hint="FedRDN fell below norm where sites store bright what others store dark: look at the "
                "images, and compare single, fedavg and norm with it first "
                "(docs/results/shift).",
            )

    def transforms(self, *, training: bool) -> Sequence[Transform]:
        """A random pair in training and the site's own in evaluation, or the average in both."""
        own = self.pairs.get(self.context.name) or self.sent or self.context.statistics(self.over)
        pairs = usable_pairs(self.pairs, own)
        if self.average and pairs:
            return [FedRDNd(keys=Keys.IMAGE, statistics=pairs, average=True)]
        if training:
            return [FedRDNd(keys=Keys.IMAGE, statistics=pairs)]
        return [FedRDNd(keys=Keys.IMAGE, statistics={self.context.name: own}, site=self.context.name)]


class FedRDNServer(GatheredServer):
    """The server's half: the list of pairs, 2C + 1 numbers per site.

    Args:
        in_channels: C.
        average: whether all pairs are needed at inference, where a site has its own otherwise.
    """

    def __init__(self, in_channels: int, average: bool = False) -> None:
        super().__init__({"mean": (in_channels,), "std": (in_channels,), "count": (1,)})
        self.kinds = {"mean": INTENSITY_MEAN, "std": INTENSITY_STD}
        self.needed_at_inference = average

    def check(self, payload: Payload) -> None:
        """Refuse statistics with which an image could not be normalised."""
        _statistics(payload["mean"], payload["std"], payload["count"]).validate()

    def channel_statistics(self) -> dict[str, ChannelStatistics]:
        """The pair of each site, by its name."""
        return {
            site: _statistics(pair["mean"], pair["std"], pair["count"])
            for site, pair in sorted(self.sites.items())
        }


def _pairs(payload: Payload) -> dict[str, ChannelStatistics]:
    """The pair of each site, of what the server sends."""
    sites = sorted(key.removeprefix("mean/") for key in payload if key.startswith("mean/"))
    return {
        site: _statistics(payload[f"mean/{site}"], payload[f"std/{site}"], payload[f"count/{site}"])
        for site in sites
    }


def _statistics(mean: Tensor, std: Tensor, count: Tensor) -> ChannelStatistics:
    return ChannelStatistics(mean=mean, std=std, count=int(count))
