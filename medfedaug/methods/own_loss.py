"""Mean losses of a method over the steps of a round."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RoundMeans"]


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
