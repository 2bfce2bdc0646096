"""The loss terms of FedFD, for diversified statistics of batch norms and diversified prompts alike."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from medfedaug.errors import ConfigError
from medfedaug.functional.operators import has_operators
from medfedaug.methods.base import Step, Targets
from medfedaug.methods.class_features import FeatureSite

Mixing = Literal["random", "global", "instance", "fixed"]
Reduction = Literal["mean", "sum"]

# Table 2 of the paper; "random" is U(low, high).
_MIXING = {"global": (0.0, 0.0), "instance": (1.0, 1.0), "fixed": (0.5, 0.5)}


def mixing_range(name: str, mixing: str, low: float, high: float) -> tuple[float, float]:
    """Return the range of u for a kind of mixing."""
    if not low <= high:
        raise ConfigError(f"{name}: low {low} is above high {high}")
    return _MIXING.get(mixing, (low, high))


@dataclass(frozen=True)
class Weights:
    """λ₁ and λ₂ of FedFD Eq. 5, the reduction of the distance, and the module with the features as input."""

    lambda1: float
    lambda2: float
    distance: str = "mean"
    head: str | None = None


class DiversifiedSite(FeatureSite):
    """A site whose loss compares a batch with its diversified version (FedFD Eq. 3-5).

    Args:
        network: the site's.
        weights: of the two terms.
    """

    def __init__(self, network: nn.Module, weights: Weights) -> None:
        super().__init__(network, weights.head)
        self.network, self.weights = network, weights
        self.ready = False  # until the server has sent the federation's values
        # On a GPU the batch and its diversified version pass through the network as one batch.
        self._together: AbstractContextManager[Any] | None = None
        self._diversified: tuple[Any, Tensor] | None = None
        network.register_forward_pre_hook(self._double)
        network.register_forward_hook(self._halve, always_call=True)

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training:
            super()._keep(module, args)
        else:
            self._seen = None

    @abstractmethod
    def diversified(self) -> AbstractContextManager[Any]:
        """A context in which the network computes diversified features."""

    def paired_batch(self) -> AbstractContextManager[Any] | None:
        """Return a context in which the network diversifies the second half of a batch, if it can."""
        return None

    def mix(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        """Decide whether the next pass has a paired batch."""
        self._together = self.paired_batch() if self._diversifies() and has_operators(inputs) else None
        return inputs, targets

    def _diversifies(self) -> bool:
        return self.ready and bool(self.weights.lambda1 or self.weights.lambda2)

    def _double(self, network: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._together is None:
            return None
        self._together.__enter__()
        return torch.cat([args[0], args[0]]), *args[1:]

    def _halve(self, network: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._together is None:
            return None
        self._together.__exit__(None, None, None)
        self._together = None
        if output is None or self._seen is None:  # the pass failed
            return None
        values, form = tree_flatten(output)
        pairs = [value.split(len(value) // 2) for value in values]
        outputs, others = (tree_unflatten(half, form) for half in zip(*pairs, strict=True))
        self._seen, seen = self._seen.split(len(self._seen) // 2)
        self._diversified = others, seen
        return outputs

    def loss(self, step: Step) -> Tensor | None:
        """Return the term that turns the task's loss into (1 − λ₁)·CE + λ₁·CACL + λ₂·CAFL."""
        features, self._features = self._features, None
        weights = self.weights
        if not self._diversifies():
            return None
        if self._diversified is not None:
            (outputs, diversified), self._diversified = self._diversified, None
        else:
            with self.diversified():
                outputs = step.network(step.inputs)
            diversified = self.last_features()
        assert features is not None
        classification = weights.lambda1 * (step.criterion(outputs, step.targets) - step.task_loss)
        distance = feature_distance(features, diversified)
        if weights.distance == "mean":
            distance = distance / features.shape[1]
        return classification + weights.lambda2 * distance


def feature_distance(features: Tensor, diversified: Tensor) -> Tensor:
    """Return CAFL (Eq. 3): ‖f − f_Δ‖² over the channels, averaged over images and voxels of feature maps."""
    return (features - diversified).square().sum(dim=1).mean()
