"""Halves of a site that several methods share: features of the head, sums by class, means over steps."""

from abc import abstractmethod
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medfedaug import functional as F
from medfedaug.errors import ConfigError
from medfedaug.methods.base import SiteContext, SiteExchange, SitePart, Step
from medfedaug.models import find_head


class HeadInput:
    """Input of a network's head at its last pass, (B, D); a subclass may reduce it in ``_keep``."""

    def __init__(self, network: nn.Module) -> None:
        self._seen: Tensor | None = None
        find_head(network).register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._seen = F.working_precision(args[0])

    def take(self) -> Tensor | None:
        """Return the features of the last pass, once; ``None`` if they were taken before."""
        features, self._seen = self._seen, None
        return features


class FeatureSite(HeadInput, SitePart):
    """The site's half of a method that uses the input of the network's head in a step's main pass."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
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


class PrototypeSite(FeatureSite, SiteExchange):
    """The site's half of a method with prototypes: features of the steps of the last local epoch.

    The site's census makes their sums by class, which leave out classes of too few patients.
    """

    def __init__(self, context: SiteContext) -> None:
        super().__init__(context.network)
        assert context.task is not None
        self.context, self.task, self.every_round = context, context.task, self
        self._epoch: deque[tuple[Tensor, Tensor, Tensor | None]] = deque()
        self._last: Tensor | None = None

    def start_round(self) -> None:
        self._epoch.clear()

    def after_pass(self, step: Step) -> None:
        super().after_pass(step)
        self._last = self._features

    def after_step(self, step: Step) -> None:
        """Keep the features of the step, up to the site's number of images; drop the oldest."""
        assert self._last is not None
        self._epoch.append((self._last.detach(), step.targets, step.patients))
        while sum(len(kept) for kept, *_ in self._epoch) > self.context.num_samples():
            self._epoch.popleft()

    def of_all_images(self) -> tuple[Tensor, Tensor]:
        """Return the sums of the features by class, (K, D), and the numbers of images, (K,), float32."""
        features, targets, patients = zip(*self._epoch, strict=True)
        known = [of_batch for of_batch in patients if of_batch is not None]
        classes = self.task.probabilities(torch.cat(targets)).double()
        everyone = torch.cat(known) if len(known) == len(patients) else None
        return self.context.census.by_class(torch.cat(features).double(), classes, everyone)


def linear_head(network: nn.Module, method: str) -> nn.Linear:
    """Return the network's last layer, whose input the features are; refuse one that is not linear."""
    layer = find_head(network)
    if not isinstance(layer, nn.Linear):
        raise ConfigError(f"{method}: the network's last layer is not fully connected")
    return layer


Reduction = Literal["mean", "sum"]


class DiversifiedSite(FeatureSite):
    """A site whose loss compares a batch with its diversified version (FedFD Eq. 3-5)."""

    def __init__(
        self, network: nn.Module, lambda1: float, lambda2: float, distance: Reduction = "mean"
    ) -> None:
        super().__init__(network)
        self.network, self.lambda1, self.lambda2, self.distance = network, lambda1, lambda2, distance
        self.ready = False  # until the server has sent the federation's values

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training:
            super()._keep(module, args)
        else:
            self._seen = None

    @abstractmethod
    def diversified(self) -> AbstractContextManager[Any]:
        """A context in which the network computes diversified features."""

    def loss(self, step: Step) -> Tensor | None:
        """Return the term that turns the task's loss into (1 − λ₁)·CE + λ₁·CACL + λ₂·CAFL."""
        features, self._features = self._features, None
        if not self.ready or not (self.lambda1 or self.lambda2):
            return None
        with self.diversified():
            outputs = step.network(step.inputs)
        diversified = self.last_features()
        assert features is not None
        classification = self.lambda1 * (step.criterion(outputs, step.targets) - step.task_loss)
        # CAFL (Eq. 3): ‖f − f_Δ‖² over the channels, averaged over images and voxels of feature maps.
        distance = (features - diversified).square().sum(dim=1).mean()
        if self.distance == "mean":
            distance = distance / features.shape[1]
        return classification + self.lambda2 * distance


class MeasuredSite(SitePart):
    """A site's half whose metrics are means over the steps of a round.

    They are read once, at the end of the round, since reading a number makes a GPU wait. ``measured`` has a
    name for each number of a step.
    """

    measured: tuple[str, ...]
    _one: Tensor | None = None
    _sums: Tensor | None = None  # of each number, and the number of steps

    def start_round(self) -> None:
        self._sums = None

    def measure(self, *numbers: Tensor) -> None:
        """Add the numbers of a step, of shape () each."""
        if self._one is None:
            self._one = numbers[0].new_ones(())
        step = torch.stack([*(number.detach() for number in numbers), self._one])
        if self._sums is None:
            self._sums = torch.zeros_like(step, dtype=torch.float64)
        self._sums += step

    def metrics(self) -> dict[str, float]:
        """Return the means by name; none before the first step."""
        if self._sums is None:
            return {}
        *sums, steps = self._sums.tolist()
        return {name: total / steps for name, total in zip(self.measured, sums, strict=True)}
