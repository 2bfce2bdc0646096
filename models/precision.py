"""Mixed precision as a property of a network."""

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn


def run_in_bfloat16(net: nn.Module) -> nn.Module:
    """Compute the network's convolutions and matrix products in bfloat16, and return float32.

    Hooks put `torch.autocast` around each call of the network, also around the passes of methods. Losses and
    the methods' equations outside of the network stay in float32, and so do weights, gradients and running
    statistics. bfloat16 has the range of float32, so that the loss needs no scaling. Hooks inside the network
    see features in bfloat16.

    Args:
        net: changed in place.

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
