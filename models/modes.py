"""Training and evaluation mode of a network, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode for a block; afterwards each module is in its own mode again.

    `nn.Module.train` would not do: some modules may be in evaluation mode within a network in training.
    """
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
