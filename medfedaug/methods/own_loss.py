"""Mean losses: of a model over a site's training images, and of a method over the steps of a round."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from medfedaug.methods.base import SiteContext
from medfedaug.models.modes import evaluating

__all__ = ["RoundMeans", "training_loss"]


class RoundMeans:
    """Means over the steps of a round, read once at its end: reading a number makes a GPU wait.

    Args:
        names: one for each number that a step gives.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._steps: list[Tensor] = []

    def clear(self) -> None:
        """Begin a round."""
        self._steps = []

    def add(self, *numbers: Tensor) -> None:
        """Take in a step, each number of shape ()."""
        self._steps.append(torch.stack([number.detach() for number in numbers]))

    def read(self) -> dict[str, float]:
        """The means by name; none before the first step."""
        if not self._steps:
            return {}
        return dict(zip(self.names, torch.stack(self._steps).double().mean(dim=0).tolist(), strict=True))


@torch.no_grad()
def training_loss(context: SiteContext, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean of the task's loss over a site's training images, in evaluation mode, () float64.

    Args:
        context: the site's.
        forward: gives the outputs for images: of the site's network, with these weights or others.
    """
    task = context.task
    assert task is not None
    found = []
    with evaluating(context.network):
        for inputs, targets in context.training_batches():
            loss = task.loss(forward(inputs), targets).double()
            found.append(torch.stack([loss * len(inputs), torch.full_like(loss, len(inputs))]))
    total, count = torch.stack(found).sum(dim=0)
    return total / count
