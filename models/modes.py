"""Training and evaluation mode of a network, module by module."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode for a block, and restore the mode of each module on exit.

    `nn.Module.train` would change modules that are in evaluation mode within a network in training.
    """
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
