"""Flips of a network's input and output: test-time augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from torch import Tensor, nn


def flips_of(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all flips of one or more axes.

    Example:
        >>> flips_of((0, 1))
        [(0,), (1,), (0, 1)]
    """
    return [flip for number in range(1, len(axes) + 1) for flip in combinations(axes, number)]


class FlippedNetwork(nn.Module):
    """A network with flipped input, whose output is flipped back.

    Args:
        network: a network of images (B, C, *spatial); of several outputs the first is used.
        axes: spatial axes, the first is 0.
    """

    def __init__(self, network: nn.Module, axes: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        self.dims = tuple(axis + 2 for axis in axes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for images (B, C, *spatial), on their own grid."""
        output = self.network(x.flip(self.dims))
        return (output[0] if isinstance(output, (list, tuple)) else output).flip(self.dims)
