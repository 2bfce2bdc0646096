"""FedFA: features augmented by as much as the sites differ, channel by channel."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from medfedaug import functional as F
from medfedaug.config.kinds import FEATURE_MEAN, FEATURE_STD
from medfedaug.errors import ConfigError
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Bounds, Contributions, Payload, ServerContext, SiteContext, zeros
from medfedaug.models import ffa_layers, insert_ffa

_ACCUMULATED = (
    "running_mean",
    "running_std",
    "num_active_batches",
    "negative_std_count",
    "sampled_std_count",
)


class FedFA(Method):
    """Federated feature augmentation, FedFAˡ (Zhou and Konukoglu, ICLR 2023; FedFA+ section 3.2).

    An `medfedaug.models.FFALayer` after each encoder stage perturbs the channel statistics of the features
    in training. The variance of the batch (Eq. 4) and γ, the modulated variance of the sites' statistics
    (Eq. 6-7), decide how far. The server sends γ with the global model.

    Exchange, every round and layer: μ̄ₖ and σ̄ₖ (C,) up, γ_μ and γ_σ (C,) down. The first round has no γ, and
    only the batch decides.

    Args:
        prob: p, the probability that a layer is active in a step.
        momentum: α of Eq. 5.
        eps: added to the variance under the square root of Eq. 2.
        variance: ``"adaptive"`` (Eq. 8), ``"direct"`` (Table 11), ``"client"`` (FedFA-C) or ``"random"``
            (FedFA-R).
        stages: the stages with a layer, all by default (Table 12).
        running: ``"reset"`` the accumulated statistics to 0 and 1 each round, as in Algorithm 1, or
            ``"continue"`` from the site's last round.
        bias_correction: remove the start value from the accumulated statistics before they are sent.

    Feature maps must not be too small: over four positions a standard deviation is mostly chance, and Eq. 8
    perturbs by its variation. With AlexNet on Office-Caltech 10 FedFA lost 0.10 in accuracy to FedAvg at
    96 x 96 pixels, with a last map of 2 x 2 positions, and nothing at 192 x 192, with 5 x 5
    (``docs/results/office``). For small images leave the last stages out with ``stages``. FedFA also learns
    more slowly than FedAvg: behind after few rounds, and ahead later, if at all.

    A site that adds noise sends statistics of the received network in evaluation mode, averaged over the
    training cases: in training, batch norm and the local steps let one patient change the contributions of
    the others.

    Deviations:
        Eq. 6 is per channel over the sites. The public code takes one variance over sites and channels, so
        that γ = 1 for any statistics. The noise of FedFA+ section 6.2 is not offered: a site chooses the
        noise of `medfedaug.hospital.privacy`. See `medfedaug.models.FFALayer` for the layer's deviations.
    """

    name = "fedfa"

    def __init__(
        self,
        prob: float = 0.5,
        momentum: float = 0.99,
        eps: float = 1e-6,
        variance: str = "adaptive",
        stages: Sequence[int | str] | None = None,
        running: str = "reset",
        bias_correction: bool = False,
    ) -> None:
        self.stages, self.variance = stages, variance
        if variance != "random":
            self.requires = frozenset({"several_images"})
        self.layer_args: dict[str, Any] = {"prob": prob, "momentum": momentum, "eps": eps}
        self.layer_args |= {"variance": variance, "running": running, "bias_correction": bias_correction}

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return insert_ffa(network, stages=self.stages, **self.layer_args)

    def at_site(self, context: SiteContext) -> SitePart:
        return FedFASite(context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        channels = {stage: layer.num_channels for stage, layer in ffa_layers(context.network).items()}
        return FedFAServer(channels, modulate=self.variance != "direct")


class FedFASite(SitePart, SiteExchange):
    def __init__(self, context: SiteContext) -> None:
        self.context = context
        self.layers = ffa_layers(context.network)
        self.every_round = self

    def start_round(self) -> None:
        for layer in self.layers.values():
            layer.start_round()

    def collect(self) -> Payload:
        """Return μ̄ₖ and σ̄ₖ of each layer.

        Few batches are in a running average, and chance decides which. A site of a real federation sends the
        statistics of all training cases under the trained network in evaluation mode instead.
        """
        census = self.context.census
        if census.strict:
            return census.over_cases(self._by_case(), then=lambda means: self.privatised(means, 0))
        payload: Payload = {}
        for stage, layer in self.layers.items():
            payload[f"{stage}/mean"], payload[f"{stage}/std"] = layer.statistics()
        return payload

    def contributions(self, bounds: Bounds) -> Contributions:
        """Return μ and σ of each layer's features, averaged over the images of a case, in evaluation mode."""
        if any(layer.running != "reset" for layer in self.layers.values()):
            raise ConfigError('noise needs running="reset"')
        kinds = {f"{stage}/mean": FEATURE_MEAN for stage in self.layers}
        kinds |= {f"{stage}/std": FEATURE_STD for stage in self.layers}
        return Contributions(kinds, self._by_case(), through_network=True)

    @torch.no_grad()
    def _by_case(self) -> Iterator[Payload]:
        network = self.context.network
        network.eval()
        for batches in self.context.case_batches():
            sums: Payload = {
                f"{stage}/{key}": torch.zeros(layer.num_channels, dtype=torch.float64)
                for stage, layer in self.layers.items()
                for key in ("mean", "std")
            }
            count = 0
            for images in batches:
                for key, value in self._features(images).items():
                    sums[key] += value.sum(dim=0).double().cpu()
                count += len(images)
            yield {key: value / count for key, value in sums.items()}  # NaN for a case without images

    def _features(self, images: Tensor) -> Payload:
        """Compute Eq. 2 for every image of a batch and layer, (B, C) each."""
        statistics: Payload = {}

        def keep(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            mean, std = F.feature_statistics(args[0], layer.eps)  # type: ignore[arg-type]
            statistics[f"{layer.stage}/mean"], statistics[f"{layer.stage}/std"] = mean, std

        with ExitStack() as hooks:
            for layer in self.layers.values():
                hooks.enter_context(layer.register_forward_hook(keep))
            self.context.network(images)
        return statistics

    def privatised(self, means: Payload, cases: int) -> Payload:
        """Compute Eq. 5 with the noisy means instead of every batch's.

        After t active batches a layer's average is αᵗ of its start and 1 − αᵗ of the features' mean. The
        server can compute t from the run's seed and the number of samples.
        """
        payload: Payload = {}
        for stage, layer in self.layers.items():
            steps = int(layer.num_active_batches)
            # As in `FFALayer.statistics`: corrected for the start, unless no batch was active.
            kept = layer.momentum**steps if steps == 0 or not layer.bias_correction else 0.0
            for key, start in (("mean", 0.0), ("std", 1.0)):
                payload[f"{stage}/{key}"] = kept * start + (1.0 - kept) * means[f"{stage}/{key}"]
        return payload

    def metrics(self) -> dict[str, float]:
        """Return the share of negative sampled standard deviations since the site's first round."""
        negative = sum(int(layer.negative_std_count) for layer in self.layers.values())
        sampled = sum(int(layer.sampled_std_count) for layer in self.layers.values())
        return {"negative_std": negative / max(sampled, 1)}

    def apply(self, payload: Payload) -> None:
        for stage, layer in self.layers.items():
            layer.set_gamma(payload[f"{stage}/gamma_mean"], payload[f"{stage}/gamma_std"])

    def state(self) -> Payload:
        """Return the layers' running statistics and counts; the server sends γ in every round."""
        return {
            f"{stage}/{name}": getattr(layer, name).clone()
            for stage, layer in self.layers.items()
            for name in _ACCUMULATED
        }

    def restore(self, state: Payload) -> None:
        for key, value in state.items():
            stage, name = key.rsplit("/", 1)
            getattr(self.layers[stage], name).copy_(value)


class FedFAServer(ServerExchange):
    """The server's half: the variance over the sites (Eq. 6) by Welford's recurrence, then γ (Eq. 7)."""

    def __init__(self, channels: dict[str, int], modulate: bool = True) -> None:
        self.shapes = {f"{stage}/{key}": (c,) for stage, c in channels.items() for key in ("mean", "std")}
        kinds = {"mean": FEATURE_MEAN, "std": FEATURE_STD}
        self.kinds = {key: kinds[key.rsplit("/", 1)[1]] for key in self.shapes}
        self.modulate = modulate
        self.gamma: Payload = {}
        self._restart()

    def check(self, payload: Payload) -> None:
        for key, value in payload.items():
            if key.endswith("/std") and bool((value < 0).any()):
                raise ValueError(f"{key}: {int((value < 0).sum())} of {value.numel()} are negative")

    def _restart(self) -> None:
        self.sites = 0
        self.mean, self.squares = zeros(self.shapes), zeros(self.shapes)

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        self.sites += 1
        for key, value in payload.items():
            delta = value.double() - self.mean[key]
            self.mean[key] += delta / self.sites
            self.squares[key] += delta * (value.double() - self.mean[key])

    def terms(self, payload: Payload) -> Payload:
        """Return the statistics and their squares, for the variance over the sites."""
        squares = {f"{key}/square": value.double().square() for key, value in payload.items()}
        return {**payload, **squares}

    def accept_mean(self, means: Payload, sites: int) -> None:
        self.sites = sites
        for key in self.shapes:  # rounding may make a variance of about 0 negative
            variance = (means[f"{key}/square"] - means[key].square()).clamp_min(0)
            self.mean[key], self.squares[key] = means[key], variance * sites

    def result(self) -> Payload:
        """Return γ_μ and γ_σ of each layer; with direct fusion, the variances themselves."""
        for key, squares in self.squares.items():
            variance = squares / self.sites
            stage, which = key.rsplit("/", 1)
            gamma = F.student_t_modulation(variance) if self.modulate else variance
            self.gamma[f"{stage}/gamma_{which}"] = gamma.to(torch.float32)
        self._restart()
        return dict(self.gamma)

    def summary(self) -> dict[str, Any]:
        """Return the range of γ over the channels, by layer."""
        ranges: dict[str, Any] = {}
        for key, gamma in self.gamma.items():
            stage, which = key.rsplit("/", 1)
            ranges.setdefault(stage, {})[which] = [float(gamma.min()), float(gamma.max())]
        return ranges
