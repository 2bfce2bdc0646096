"""Execution of a network on a machine: mixed precision, compilation, and weights channels last."""

import copy
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from medfedaug.errors import first_line, warn

Network = TypeVar("Network", bound=nn.Module)

_NORMS = {_BatchNorm: "batch", _InstanceNorm: "instance", nn.GroupNorm: "group"}


def run_in_bfloat16(net: nn.Module) -> nn.Module:
    """Compute the network's convolutions and matrix products in bfloat16, and return float32.

    Hooks put `torch.autocast` around each call of the network, also around the passes of methods. Losses and
    the methods' equations outside of the network stay in float32, and so do weights, gradients and running
    statistics. bfloat16 has the range of float32, so that the loss needs no scaling. Hooks inside the network
    see features in bfloat16. The network is changed in place.

    Example:
        >>> net = run_in_bfloat16(nn.Conv2d(1, 1, 1))
        >>> net(torch.rand(1, 1, 4, 4)).dtype, net.weight.dtype
        (torch.float32, torch.float32)
    """
    casting = _Casting()
    net.register_forward_pre_hook(casting.enter)
    net.register_forward_hook(casting.leave, always_call=True)
    return net


def bfloat16_speedup(
    network: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    criterion: Callable[[Tensor, Tensor], Tensor],
    turns: int = 5,
) -> float:
    """Return the time of a forward and a backward pass in float32, divided by that in bfloat16."""
    networks = (network, run_in_bfloat16(copy.deepcopy(network)))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for model, seconds in zip(networks, times, strict=True):
            _finish(inputs.device)
            started = time.perf_counter()
            criterion(model(inputs), targets).backward()
            _finish(inputs.device)
            if turn:
                seconds.append(time.perf_counter() - started)
            model.zero_grad(set_to_none=True)
    return median(times[0]) / median(times[1])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Casting:
    """The hooks around a call; calls may be nested."""

    def __init__(self) -> None:
        self.active: list[torch.autocast] = []

    def enter(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        context = torch.autocast(args[0].device.type, torch.bfloat16)
        context.__enter__()
        self.active.append(context)

    def leave(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        self.active.pop().__exit__(None, None, None)
        if isinstance(output, (list, tuple)):
            return [_float(head) for head in output]
        return _float(output)  # None: the network raised an error


def _float(output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) else output


def compile_calls(network: nn.Module, site: str) -> None:
    """Compile the calls of a network, its hooks included, in place; copies of the network are plain.

    If compiling fails, the call and all later ones are plain, and a warning says why. A backward pass fails
    outside of the call (`medfedaug.federation.site.local_training`).
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # methods add and remove hooks
    torch._dynamo.config.recompile_limit = 64  # of all networks of a class, in a process
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


def norm_of(network: nn.Module) -> str:
    """Return the kind of the most frequent norm layer; ``"none"`` without one."""
    kinds = Counter(
        name for module in network.modules() for kind, name in _NORMS.items() if isinstance(module, kind)
    )
    return kinds.most_common(1)[0][0] if kinds else "none"


def is_faster_last(network: nn.Module, device: str) -> bool:
    """Return whether a network trains faster channels last on a type of device; ``False`` if not measured.

    On a CPU, in two dimensions, it takes 0.91 of the time with batch norm and 0.92 with group norm. With
    instance norm or in three dimensions it takes as long or longer (``docs/benchmarks.md``).
    """
    dimensions = Counter(m.weight.ndim - 2 for m in network.modules() if isinstance(m, _ConvNd))
    planes = bool(dimensions) and dimensions.most_common(1)[0][0] == 2
    return device == "cpu" and planes and norm_of(network) in ("batch", "group")


def lay_out(network: Network) -> Network:
    """Give the weights of a network on its device the faster layout, in place.

    Convolutions lay out features as their weights are. A network that was not measured keeps its own layout.
    """
    device = next((parameter.device.type for parameter in network.parameters()), "cpu")
    if is_faster_last(network, device):
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network
