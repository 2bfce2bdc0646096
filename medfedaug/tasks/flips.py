"""Flips of a network's input, and of its output back: test-time augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from torch import Tensor, nn


def flips_of(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all flips of some axes but the one of none.

    Example:
        >>> flips_of((0, 1))
        [(0,), (1,), (0, 1)]
    """
    return [chosen for number in range(1, len(axes) + 1) for chosen in combinations(axes, number)]


class FlippedNetwork(nn.Module):
    """A network that sees its input flipped, and whose output is flipped back.

    Args:
        network: of images (B, C, *spatial); of several outputs the first is used.
        axes: spatial axes, the first is 0.
    """

    def __init__(self, network: nn.Module, axes: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        self.dims = tuple(axis + 2 for axis in axes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for images (B, C, *spatial), on their own grid."""
        found = self.network(x.flip(self.dims))
        output: Tensor = found[0] if isinstance(found, (list, tuple)) else found
        return output.flip(self.dims)
