"""Entries of a network that are not trained."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


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
