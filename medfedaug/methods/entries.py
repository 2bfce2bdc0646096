"""State-dict entries of a network by module."""

from collections.abc import Iterable

from torch import nn


def state_entries(network: nn.Module, types: tuple[type[nn.Module], ...]) -> frozenset[str]:
    """Return the state-dict keys of modules of some types.

    A word in the key does not tell the type: ``"bn" in key`` misses ``downsample.1.weight``.
    """
    owned: set[str] = set()
    for prefix, module in network.named_modules():
        if isinstance(module, types):
            owned.update(f"{prefix}.{key}" if prefix else key for key in module.state_dict())
    return frozenset(owned)


def module_entries(network: nn.Module, modules: Iterable[nn.Module]) -> frozenset[str]:
    """Return the state-dict keys of modules, without their submodules' keys."""
    wanted = set(modules)
    return frozenset(
        f"{prefix}.{key}" if prefix else key
        for prefix, module in network.named_modules()
        if module in wanted
        for key in module.state_dict()
        if "." not in key
    )
