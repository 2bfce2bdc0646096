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
    """Raised when the pass reaches the stage."""


def modules_before(net: nn.Module, stage: Stage) -> list[nn.Module]:
    """Return the modules with parameters on which the features of a stage depend.

    One pass in evaluation mode, with shapes and gradients but no values (PyTorch's ``meta`` device), finds
    them: the order in which a network registers its modules need not be the order of its layers.
    """
    named = dict(net.named_parameters(remove_duplicate=False))
    parameters = {key: torch.empty_like(p, device="meta").requires_grad_() for key, p in named.items()}
    named_buffers = net.named_buffers(remove_duplicate=False)
    buffers = {key: torch.empty_like(buffer, device="meta") for key, buffer in named_buffers}
    outputs: list[Tensor] = []

    def keep(features: Tensor) -> None:
        outputs.append(features)
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
    if not outputs:
        raise ValueError(f"no image reaches stage {stage.name}")
    gradients = torch.autograd.grad(outputs[0].sum(), list(parameters.values()), allow_unused=True)
    reached = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    owners = {name.rpartition(".")[0] for name in reached}
    return [module for name, module in net.named_modules(remove_duplicate=False) if name in owners]


def _image(net: nn.Module) -> tuple[int, ...]:
    """Return the shape of a batch that a network takes, (B, C, *spatial)."""
    first = next(module for module in net.modules() if isinstance(module, _ConvNd))
    return 1, first.in_channels, *some_size(net, first.weight.dim() - 2)
