"""Passes of a network with other weights or in evaluation mode; names of its entries, and frozen ones."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm


def call_with(net: nn.Module, weights: Mapping[str, Tensor], *inputs: Any) -> Any:
    """Call a network with other parameters and buffers, without changing its own.

    If a module has two names in a network, as in MONAI's DynUNet, `torch.func.functional_call` refuses
    weights under both, and leaves weights under one of them in the network.
    """
    values: dict[tuple[int, str], tuple[str, Tensor]] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module._buffers):
            key = f"{path}.{name}" if path else name
            if key in weights:
                values.setdefault((id(module), name), (key, weights[key]))
    return functional_call(net, dict(values.values()), inputs, tie_weights=False)


def first_names(net: nn.Module) -> dict[str, str]:
    """Map each entry of a network's state dict to the first name of its tensor.

    The entries of a module that is registered twice, as in MONAI's DynUNet, have two names. They are sent,
    kept and frozen under the first. A state dict is loaded in order, so that a value under the second name
    would overwrite the first.
    """
    return first_names_of(net.state_dict(keep_vars=True))


def first_names_of(entries: Mapping[str, Tensor]) -> dict[str, str]:
    """Map entries of a state dict that keeps its variables to first names (`first_names`)."""
    first: dict[int, str] = {}
    return {key: first.setdefault(id(value), key) for key, value in entries.items()}


def shared_by_name(net: nn.Module, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return entries of a state dict in which all names of one tensor of the network have the first's."""
    names = first_names(net)
    return {key: entries[names[key]] for key in entries}


def state_entries(network: nn.Module, types: tuple[type[nn.Module], ...]) -> frozenset[str]:
    """Return the state-dict keys of modules of some types.

    A word in the key does not tell the type: ``"bn" in key`` misses ``downsample.1.weight``.
    """
    owned: set[str] = set()
    for prefix, module in network.named_modules():
        if isinstance(module, types):
            owned.update(f"{prefix}.{key}" if prefix else key for key in module.state_dict())
    return frozenset(owned)


def trained_entries(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a network that are entries of its state dict, by name."""
    entries = net.state_dict().keys()
    return {name: p for name, p in net.named_parameters() if p.requires_grad and name in entries}


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


def freeze(net: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Exclude entries of a network's state dict from training, by patterns of their names.

    Parameters that match get no gradient. For batch norms whose running statistics match, call `hold_norms`.

    Patterns are such as ``"encoder.*"``; a star stands for any text, dots included. The result is the entries
    that match, and other names of the same tensors.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        >>> sorted(freeze(net, ["0.*"])), net[0].weight.requires_grad
        (['0.bias', '0.weight'], False)
    """
    if not patterns:
        return frozenset()
    entries, frozen = net.state_dict(keep_vars=True), set()
    for pattern in patterns:
        matches = {id(value) for name, value in entries.items() if fnmatchcase(name, pattern)}
        if not matches:
            names = list(entries)
            examples = ", ".join([*names[:2], "...", *names[-2:]])
            raise ValueError(f"freeze: no entry matches {pattern!r}; entries are for instance {examples}")
        frozen |= matches
    for parameter in net.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in net.parameters()):
        raise ValueError("freeze: no parameter is left to be trained")
    return frozenset(name for name, value in entries.items() if id(value) in frozen)


def hold_norms(net: nn.Module, frozen: frozenset[str]) -> None:
    """Let batch norms with frozen running statistics use these in training, without updating them.

    ``frozen`` are the entries that `freeze` returned. The next call of `net.train()` undoes it.
    """
    for path, module in net.named_modules():
        if isinstance(module, _BatchNorm) and f"{path}.running_mean".lstrip(".") in frozen:
            module.eval()
