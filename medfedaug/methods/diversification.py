"""The loss terms of FedFD, for diversified statistics of batch norms and diversified prompts alike."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from medfedaug.methods.base import Step
from medfedaug.methods.class_features import FeatureSite

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Weights:
    """λ₁ and λ₂ of FedFD Eq. 5, the reduction of the distance, and the module with the features as input."""

    lambda1: float
    lambda2: float
    distance: str = "mean"
    head: str | None = None


class DiversifiedSite(FeatureSite):
    """A site whose loss compares a batch with its diversified version (FedFD Eq. 3-5)."""

    def __init__(self, network: nn.Module, weights: Weights) -> None:
        super().__init__(network, weights.head)
        self.network, self.weights = network, weights
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
        weights = self.weights
        if not self.ready or not (weights.lambda1 or weights.lambda2):
            return None
        with self.diversified():
            outputs = step.network(step.inputs)
        diversified = self.last_features()
        assert features is not None
        classification = weights.lambda1 * (step.criterion(outputs, step.targets) - step.task_loss)
        # CAFL (Eq. 3): ‖f − f_Δ‖² over the channels, averaged over images and voxels of feature maps.
        distance = (features - diversified).square().sum(dim=1).mean()
        if weights.distance == "mean":
            distance = distance / features.shape[1]
        return classification + weights.lambda2 * distance
