"""A pass of a network with other weights than its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def call_with(net: nn.Module, weights: Mapping[str, Tensor], *inputs: Any) -> Any:
    """Call a network with other parameters and buffers; its own stay as they are.

    `torch.func.functional_call` alone would not do: where one module has two names in a network, as in
    MONAI's DynUNet, it refuses weights under both, and under one it leaves them in the network.

    Args:
        net: the network.
        weights: by name; entries that are missing are the network's. Of a module with several names, any.
        *inputs: of the network.
    """
    given: dict[tuple[int, str], tuple[str, Tensor]] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module._buffers):
            key = f"{path}.{name}" if path else name
            if key in weights:
                given.setdefault((id(module), name), (key, weights[key]))
    return functional_call(net, dict(given.values()), inputs, tie_weights=False)


def first_names(net: nn.Module) -> dict[str, str]:
    """Map each entry of a network's state dict to the first name of its tensor.

    A module that is registered in two places, as each of MONAI's DynUNet is, has two names, and so have its
    entries. They are sent, kept and frozen under the first; under the second they would undo it, since a
    state dict is loaded in its order.
    """
    return first_names_of(net.state_dict(keep_vars=True))


def first_names_of(entries: Mapping[str, Tensor]) -> dict[str, str]:
    """Map entries to first names (`first_names`): those of a state dict that keeps its variables."""
    first: dict[int, str] = {}
    return {key: first.setdefault(id(value), key) for key, value in entries.items()}


def shared_by_name(net: nn.Module, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries of a state dict in which names of one tensor of the network have one tensor, the first."""
    names = first_names(net)
    return {key: entries[names[key]] for key in entries}


def trained_entries(net: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a network that are entries of its state dict, by name."""
    entries = net.state_dict().keys()
    return {
        name: parameter
        for name, parameter in net.named_parameters()
        if parameter.requires_grad and name in entries
    }
