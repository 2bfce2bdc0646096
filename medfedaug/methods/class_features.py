"""Features of a network and their sums by class, for methods with prototypes."""

from collections import deque
from collections.abc import Iterator
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

    The site's census makes the sums, which leave out classes of too few patients.

    Args:
        context: the site's.
        head: dotted name of the module whose input the features are; by default the network's last layer.
        passes: the features in `of_all_images`: ``"training"``, of the steps of the last local epoch, or
            ``"evaluation"``, of all training images under the trained network in evaluation mode.
    """

    def __init__(self, context: SiteContext, head: str | None = None, passes: str = "training") -> None:
        assert context.task is not None
        self.context, self.task, self.passes = context, context.task, passes
        self._epoch: deque[tuple[Tensor, Tensor, Tensor | None]] = deque()
        super().__init__(context.network, head)

    def start_round(self) -> None:
        """Forget the features of the previous round."""
        self._epoch.clear()

    def keep(self, features: Tensor, targets: Tensor, patients: Tensor | None = None) -> None:
        """Keep the features of a step, up to the site's number of images; drop the oldest."""
        if self.passes == "evaluation":
            return
        self._epoch.append((features.detach(), targets, patients))
        while sum(len(kept) for kept, *_ in self._epoch) > self.context.num_samples():
            self._epoch.popleft()

    def sums(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of a batch's features by class, (K, D), and the numbers of images, (K,)."""
        classes = self.task.probabilities(targets).to(features)
        return classes.T @ features, classes.sum(dim=0)

    def of_all_images(self) -> tuple[Tensor, Tensor]:
        """Return the sums and numbers of all training images, float32."""
        kept = self._evaluated() if self.passes == "evaluation" else self._epoch
        features, targets, patients = zip(*kept, strict=True)
        known = [of_batch for of_batch in patients if of_batch is not None]
        classes = self.task.probabilities(torch.cat(targets)).double()
        everyone = torch.cat(known) if len(known) == len(patients) else None
        return self.context.census.by_class(torch.cat(features).double(), classes, everyone)

    @torch.no_grad()
    def _evaluated(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        network, patients = self.context.network, self.context.census.patients_of_samples()
        network.eval()
        for inputs, targets in self.context.training_batches():
            network(inputs)
            features = self.take()
            assert features is not None
            of_batch, patients = patients[: len(inputs)], patients[len(inputs) :]
            yield features, targets, of_batch


class PrototypeSite(SitePart, SiteExchange):
    """The site's half of a method with prototypes; arguments as of `ClassFeatures`."""

    def __init__(self, context: SiteContext, head: str | None, passes: str) -> None:
        self.context, self.every_round = context, self
        self.features = ClassFeatures(context, head, passes)
        self._last: tuple[Tensor, Tensor, Tensor | None] | None = None

    def start_round(self) -> None:
        self.features.start_round()

    def take_features(self, step: Step) -> Tensor | None:
        """Return the features of a step's main pass, (B, D); `after_step` keeps them for the prototypes."""
        features = self.features.take()
        self._last = None if features is None else (features.detach(), step.targets, step.patients)
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
