"""Calls of a network through `torch.compile`, with the plain network where that fails."""

from typing import Any

import torch
from torch import nn

from medfedaug.errors import first_line, warn


def compile_calls(network: nn.Module, site: str) -> None:
    """Compile the calls of a network, its hooks included, in place; copies of the network are plain.

    If compiling fails, the call and all later ones are plain, and a warning says why. A backward pass fails
    outside of the call (`medfedaug.federation.site.local_training`).
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # methods add and remove hooks
    compiled = torch.compile(network._call_impl)

    def call(*args: Any, **settings: Any) -> Any:
        try:
            return compiled(*args, **settings)
        except Exception as error:  # of many kinds: of the compiler, and of the network itself
            call_plainly(network)
            outputs = network(*args, **settings)  # an error of the network is raised again
            warn(f"the network is not compiled: {first_line(error)}", site=site)
            return outputs

    network._compiled_call_impl = call


def call_plainly(network: nn.Module) -> bool:
    """Undo `compile_calls`; return whether calls were compiled."""
    compiled = network._compiled_call_impl is not None
    network._compiled_call_impl = None
    return compiled
