"""The loss terms of FedFD, for diversified statistics of batch norms and diversified prompts alike."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor, nn

from medfedaug.methods.base import Step
from medfedaug.methods.class_features import FeatureSite

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
