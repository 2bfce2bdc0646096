"""Find the entries of a network on which the features of a stage depend."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from medfedaug.models.modes import evaluating
from medfedaug.models.sizes import some_size
from medfedaug.models.stages import Stage
from medfedaug.models.substitution import call_with


class _Reached(Exception):
    """The pass has come to the stage."""


def modules_before(net: nn.Module, stage: Stage) -> list[nn.Module]:
    """The modules whose parameters the features of a stage depend on.

    They are found by one pass, in evaluation mode, that carries shapes and gradients but no values (PyTorch's
    ``meta`` device): the order in which a network's modules are registered need not be that of its layers. A
    module without parameters is not found.

    Args:
        net: a network whose stages are known; it stays as it is.
        stage: one of them.
    """
    parameters = {
        name: torch.empty_like(parameter, device="meta").requires_grad_()
        for name, parameter in net.named_parameters(remove_duplicate=False)
    }
    buffers = {
        name: torch.empty_like(buffer, device="meta")
        for name, buffer in net.named_buffers(remove_duplicate=False)
    }
    found: list[Tensor] = []

    def keep(features: Tensor) -> None:
        found.append(features)
        raise _Reached

    handle = stage.watch(net, keep)
    try:
        with evaluating(net), torch.enable_grad():
            call_with(net, {**parameters, **buffers}, torch.empty(_image(net), device="meta"))
    except _Reached:
        pass
    except Exception as error:
        raise ValueError(f"no image reaches stage {stage.name}: {error}") from error
    finally:
        handle.remove()
    if not found:
        raise ValueError(f"no image reaches stage {stage.name}")
    gradients = torch.autograd.grad(found[0].sum(), list(parameters.values()), allow_unused=True)
    reached = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    owners = {name.rpartition(".")[0] for name in reached}
    return [module for name, module in net.named_modules(remove_duplicate=False) if name in owners]


def _image(net: nn.Module) -> tuple[int, ...]:
    """The shape of a batch that a network takes, (B, C, *spatial)."""
    first = next(module for module in net.modules() if isinstance(module, _ConvNd))
    return 1, first.in_channels, *some_size(net, first.weight.dim() - 2)
