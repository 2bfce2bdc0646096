"""FedFAʰ: alignment of the sites' feature histograms."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from torch import Tensor, nn

from medfedaug import functional as F
from medfedaug.config.kinds import FEATURE_MEAN, HISTOGRAM
from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Bounds, Contributions, Payload, ServerContext, SiteContext, Step, zeros
from medfedaug.models.insertion import choose_stages
from medfedaug.models.stages import Stage


class FedFAh(Method):
    """Alignment of high-order feature statistics, FedFAʰ (FedFA+ section 3.3). With `FedFA` it is FedFA+.

    z is the output of the last encoder stage, augmented by `FedFA` if combined with it, averaged over space.
    After local training a site computes the soft histogram of each channel of z over its training set
    (Eq. 11-13); the server averages the sites' histograms to π; in the next round the loss gains
    λ·(KL(π_b‖π) + KL(π‖π_b))/2, with the mini-batch's histogram π_b (Eq. 14-15).

    ``range`` chooses one of two readings of the range in Eq. 12, z_min and z_max of each channel, for a
    mini-batch:

    - ``"batch"``: the mini-batch's smallest and largest value, through which the gradient passes;
    - ``"stored"``: over all training images, in evaluation mode, under the site's trained model at the end of
      the previous round, or under the received model if it missed that round.

    The sent histogram always has the range of all training images under the model just trained, in
    evaluation mode.

    Exchange, every round: the histogram (C, L) up, the average (C, L) down. The range stays at the site.

    Args:
        weight: λ of Eq. 15.
        bins: L, the number of bins, at most 32: more bins would list the images.
        tau: τ of Eq. 12, at least 0.001.
        stage: number, counted from 1, or name of the stage whose output is aligned; the last by default.
        samples: ``"images"``: one sample per image, the mean over space; ``"pixels"``: one per pixel.
        range: ``"batch"`` or ``"stored"``, see above; ``"batch"`` had slightly the best validation scores
            over phantom and retina.

    In our measurements the paper's λ = 0.1 loses to `FedFA` alone with every range: 0.058 to 0.077 Dice in
    the mean over five phantom federations, 0.041 to 0.048 over three trainings on retinal photographs.
    λ = 0.01 showed no loss, and neither did λ = 0.1 after long training on larger images in batches of 32
    (Office-Caltech 10 at 192 x 192, three seeds).

    A site that adds noise sends the histogram of the received network in evaluation mode, in the site's
    public range for ``feature_mean`` in every channel, as the mean over the training cases. Mini-batches then
    have that range, for any ``range``.

    Deviations:
        The paper does not define samples, here the mean over space, nor the values in the range of Eq. 12,
        which ``range`` decides; with ``"stored"`` a site that missed a round makes an extra pass over its
        training images. The divergence is the mean over the channels. Eq. 12 gives ẑ the codomain [0, 1];
        with ``"stored"`` samples of a mini-batch leave it, and fall into the outermost bin on their side
        (`functional.soft_histogram`). The first round of a federation has no histogram, and no term. The
        passes over the training set are without augmentation. At τ = 0.01 the soft bins are so steep that the
        rounding of float32 grows to a tenth of the update within three rounds: runs with another order of
        sums differ by as much, and cannot be compared bit by bit.
    """

    name = "fedfa_h"

    def __init__(
        self,
        weight: NotNegative = 0.1,
        bins: Annotated[int, Interval(ge=2, le=32)] = 8,
        tau: Annotated[float, Interval(ge=1e-3)] = 0.01,
        stage: int | str = -1,
        samples: Literal["images", "pixels"] = "images",
        range: Literal["batch", "stored"] = "batch",
    ) -> None:
        self.weight, self.bins, self.tau, self.stage, self.samples = weight, bins, tau, stage, samples
        self.range = range

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Check that the network has the stage."""
        self._stage(network)
        return network

    def at_site(self, context: SiteContext) -> SitePart:
        return FedFAhSite(self, context, self._stage(context.network))

    def every_round(self, context: ServerContext) -> ServerExchange:
        return FedFAhServer(self._stage(context.network).channels, self.bins)

    def _stage(self, network: nn.Module) -> Stage:
        return choose_stages(network, None if self.stage == -1 else [self.stage])[-1]


class FedFAhSite(SitePart, SiteExchange):
    def __init__(self, method: FedFAh, context: SiteContext, stage: Stage) -> None:
        self.method, self.context, self.channels = method, context, stage.channels
        self.every_round = self
        self.target: Tensor | None = None
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        # The round at whose end the range was taken; None for a public range, valid in every round.
        self.range_of: int | None = -1
        self._features: Tensor | None = None
        # Registered after the layers of FedFA, it gets augmented features.
        stage.watch(context.network, self._keep)

    def _keep(self, features: Tensor) -> None:
        features = F.working_precision(features)
        if self.method.samples == "pixels":
            self._features = features.flatten(2).transpose(1, 2).flatten(0, 1)
        else:
            self._features = features.flatten(2).mean(dim=2)

    @torch.no_grad()
    def start_round(self) -> None:
        """Take the stored range under the received model after a missed round."""
        before = self.context.round() - 1
        if self.target is None or self.range_of is None:
            return
        if self.method.range == "stored" and self.range_of != before:
            self._take_range(self._batches())
        self.range_of = before

    def loss(self, step: Step) -> Tensor | None:
        """Return λ times the divergence of the mini-batch's histogram from the federation's."""
        features, self._features = self._features, None
        if self.target is None or features is None:
            return None
        of_batch = self.method.range == "batch" and self.range_of is not None
        low, high = (None, None) if of_batch else (self.low, self.high)
        histogram = F.soft_histogram(features, self.method.bins, self.method.tau, low, high)
        return self.method.weight * F.symmetric_kl(histogram, self.target)

    @torch.no_grad()
    def collect(self) -> Payload:
        """Return the histogram of the training set under the network just trained.

        A site of a real federation merges adjacent bins of too few patients.
        """
        self.range_of = self.context.round()
        if self.context.census.strict:
            self._take_range(self._batches())
            return {"histogram": self.context.census.histogram(self._counts())}
        # Range and counts need two passes over the features; pixels are too many to keep.
        kept = list(self._batches()) if self.method.samples == "images" else None
        self._take_range(self._batches() if kept is None else kept)
        counts = self._counts_of(self._batches() if kept is None else kept)
        return {"histogram": (counts / counts.sum(dim=1, keepdim=True)).float()}

    def _counts(self) -> Iterator[Tensor]:
        for batches in self.context.case_batches():
            yield self._counts_of(self._samples(batches))

    def _counts_of(self, batches: Iterable[Tensor]) -> Tensor:
        """Return the number of samples in each bin, (C, L), float64."""
        counts = torch.zeros(self.channels, self.method.bins, dtype=torch.float64)
        for z in batches:
            part = F.soft_histogram(z, self.method.bins, self.method.tau, self.low, self.high)
            counts += part.double().cpu() * len(z)
        return counts

    def _take_range(self, batches: Iterable[Tensor]) -> None:
        self.low = self.high = None
        for z in batches:
            low, high = z.amin(dim=0), z.amax(dim=0)
            self.low = low if self.low is None else torch.minimum(self.low, low)
            self.high = high if self.high is None else torch.maximum(self.high, high)

    def _batches(self) -> Iterable[Tensor]:
        yield from self._samples(self.context.training_images())

    def _samples(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        network = self.context.network
        network.eval()
        for images in batches:
            network(images)
            assert self._features is not None
            yield self._features
        self._features = None

    def contributions(self, bounds: Bounds) -> Contributions:
        """Return the histogram of each case in a public range, which no case can change."""
        return Contributions({"histogram": HISTOGRAM}, self._by_case(*bounds(FEATURE_MEAN)), True)

    @torch.no_grad()
    def _by_case(self, low: float, high: float) -> Iterator[Payload]:
        device = self.context.device
        self.low, self.high = (torch.full((self.channels,), value, device=device) for value in (low, high))
        self.range_of = None
        for counts in self._counts():  # NaN for a case without images
            yield {"histogram": counts / counts.sum(dim=1, keepdim=True)}

    def apply(self, payload: Payload) -> None:
        self.target = payload["histogram"].to(self.context.device)

    def state(self) -> Payload:
        """Return the range for the mini-batches of the next round, and its round."""
        if self.low is None or self.high is None:
            return {}
        round_ = {} if self.range_of is None else {"round": torch.tensor(self.range_of)}
        return {"low": self.low, "high": self.high, **round_}

    def restore(self, state: Payload) -> None:
        self.low, self.high = (state[key].to(self.context.device) for key in ("low", "high"))
        self.range_of = int(state["round"]) if "round" in state else None


class FedFAhServer(ServerExchange):
    """The server's half: a running sum of histograms."""

    def __init__(self, channels: int, bins: int) -> None:
        self.shapes = {"histogram": (channels, bins)}
        self._restart()

    def _restart(self) -> None:
        self.sites, self.total = 0, zeros(self.shapes)["histogram"]

    def check(self, payload: Payload) -> None:
        histogram = payload["histogram"]
        if bool((histogram < 0).any()) or bool(((histogram.sum(dim=1) - 1).abs() > 1e-3).any()):
            raise ValueError("not histograms: counts are negative or do not add up to one")

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        self.sites += 1
        self.total += payload["histogram"].double()

    def terms(self, payload: Payload) -> Payload:
        return payload

    def accept_mean(self, means: Payload, sites: int) -> None:
        self.sites, self.total = sites, means["histogram"] * sites

    def result(self) -> Payload:
        average = (self.total / self.sites).to(torch.float32)
        self.entropy = float(-(average * average.clamp_min(1e-12).log()).sum(dim=1).mean())
        self._restart()
        return {"histogram": average}

    def summary(self) -> dict[str, Any]:
        """Return the mean entropy of the channels' histograms in nats; log L for equal bins."""
        return {"entropy": self.entropy}
