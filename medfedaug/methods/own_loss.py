"""Mean losses of a method over the steps of a round."""

import torch
from torch import Tensor


class RoundMeans:
    """Means over the steps of a round, read once at its end, since reading a number makes a GPU wait.

    ``names`` has one for each number of a step.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._one: Tensor | None = None
        self._sums: Tensor | None = None  # of each number, and the number of steps

    def clear(self) -> None:
        """Begin a round."""
        self._sums = None

    def add(self, *numbers: Tensor) -> None:
        """Add the numbers of a step, of shape () each."""
        if self._one is None:
            self._one = numbers[0].new_ones(())
        step = torch.stack([*(number.detach() for number in numbers), self._one])
        if self._sums is None:
            self._sums = torch.zeros_like(step, dtype=torch.float64)
        self._sums += step

    def read(self) -> dict[str, float]:
        """Return the means by name; none before the first step."""
        if self._sums is None:
            return {}
        *sums, steps = self._sums.tolist()
        return {name: total / steps for name, total in zip(self.names, sums, strict=True)}
