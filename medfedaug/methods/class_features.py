"""Features of a network and their sums by class, for methods with prototypes."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medfedaug import functional as F
from medfedaug.errors import ConfigError
from medfedaug.methods.base import SiteContext, SiteExchange, SitePart, Step
from medfedaug.models import find_head

Passes = Literal["training", "evaluation"]


class HeadInput:
    """Input of a network's head at its last pass, (B, D); a subclass may reduce it in ``_keep``."""

    def __init__(self, network: nn.Module, head: str | None = None) -> None:
        self._seen: Tensor | None = None
        find_head(network, head).register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._seen = F.working_precision(args[0])

    def take(self) -> Tensor | None:
        """Return the features of the last pass, once; ``None`` if they were taken before."""
        features, self._seen = self._seen, None
        return features


class FeatureSite(HeadInput, SitePart):
    """The site's half of a method that uses the input of the network's head in a step's main pass."""

    def __init__(self, network: nn.Module, head: str | None = None) -> None:
        super().__init__(network, head)
        self._features: Tensor | None = None

    def last_features(self) -> Tensor:
        """Return the features of the last pass, once."""
        features = self.take()
        assert features is not None
        return features

    def after_pass(self, step: Step) -> None:
        self._features = self.take()

    def step_features(self) -> Tensor:
        """Return the features of the step's main pass, once."""
        features, self._features = self._features, None
        assert features is not None
        return features


class ClassFeatures(HeadInput):
    """Input of a network's head at every pass, and its sums by class over a site's images.

    Args:
        context: the site's.
        head: dotted name of the module whose input the features are; by default the network's last layer.
        passes: the features in `of_all_images`: ``"training"``, of the steps of the last local epoch, or
            ``"evaluation"``, of all training images under the trained network in evaluation mode.
    """

    def __init__(self, context: SiteContext, head: str | None = None, passes: str = "training") -> None:
        assert context.task is not None
        self.context, self.task, self.passes = context, context.task, passes
        self._epoch: deque[tuple[Tensor, Tensor]] = deque()
        super().__init__(context.network, head)

    def start_round(self) -> None:
        """Forget the features of the previous round."""
        self._epoch.clear()

    def keep(self, features: Tensor, targets: Tensor) -> None:
        """Keep the features of a step, up to the site's number of images; drop the oldest."""
        if self.passes == "evaluation":
            return
        self._epoch.append((features.detach(), targets))
        while sum(len(kept) for kept, _ in self._epoch) > self.context.num_samples():
            self._epoch.popleft()

    def sums(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of a batch's features by class, (K, D), and the numbers of images, (K,)."""
        classes = self.task.probabilities(targets).to(features)
        return classes.T @ features, classes.sum(dim=0)

    def of_all_images(self) -> tuple[Tensor, Tensor]:
        """Return the sums and numbers of all training images, float64."""
        if self.passes == "evaluation":
            return self._evaluated()
        features, targets = (torch.cat(parts) for parts in zip(*self._epoch, strict=True))
        return self.sums(features.double(), targets)

    @torch.no_grad()
    def _evaluated(self) -> tuple[Tensor, Tensor]:
        network = self.context.network
        network.eval()
        sums, counts = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for inputs, targets in self.context.training_batches():
            network(inputs)
            features = self.take()
            assert features is not None
            part = self.sums(features.double(), targets)
            sums, counts = sums.to(part[0]) + part[0], counts.to(part[1]) + part[1]
        return sums, counts


class PrototypeSite(SitePart, SiteExchange):
    """The site's half of a method with prototypes; arguments as of `ClassFeatures`."""

    def __init__(self, context: SiteContext, head: str | None, passes: str) -> None:
        self.context, self.every_round = context, self
        self.features = ClassFeatures(context, head, passes)
        self._last: tuple[Tensor, Tensor] | None = None

    def fewest_cases(self) -> int | None:
        """Return the smallest number of cases of a class."""
        return min(self.context.cases_by_class(), default=None)

    def start_round(self) -> None:
        self.features.start_round()

    def take_features(self, step: Step) -> Tensor | None:
        """Return the features of a step's main pass, (B, D); `after_step` keeps them for the prototypes."""
        features = self.features.take()
        self._last = (features.detach(), step.targets) if features is not None else None
        return features

    def after_step(self, step: Step) -> None:
        if self._last is not None:
            self.features.keep(*self._last)


def linear_head(network: nn.Module, head: str | None, method: str) -> nn.Linear:
    """Return the network's last layer, whose input the features are; refuse one that is not linear."""
    layer = find_head(network, head)
    if not isinstance(layer, nn.Linear):
        raise ConfigError(f"{method}: the network's last layer is not fully connected; name one (head)")
    return layer
