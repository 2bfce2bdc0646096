"""Batch norm and instance norm assembled in place of a batch norm (gPerXAN)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug.errors import WITH_BATCH_NORM
from medfedaug.functional.features import normalising
from medfedaug.functional.passes import scale_by_moments
from medfedaug.models.hooks import PickledHook

Network = TypeVar("Network", bound=nn.Module)


@dataclass
class InstanceBranch:
    """Instance norm of one batch norm: leaves with a gradient, and no parameters of the network.

    Args:
        weight: (C,), initially 1.
        bias: (C,), initially 0.
        scores: of the batch norm and of the instance norm, (2,), initially 1.
    """

    weight: Tensor
    bias: Tensor
    scores: Tensor


def assemble_norms(net: Network) -> Network:
    """Add an instance norm to every batch norm that keeps statistics (XAN).

    ::

        XAN(h) = s₁ BN(h) + s₂ IN(h),   s = softmax(scores)

    with weights and biases of both, in training and in evaluation. Modules, names and state dict stay the
    same.

    Args:
        net: changed in place.

    Deviations:
        A feature without spatial dimensions has no instance statistics, and gets the batch norm alone.
    """
    for module in net.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            ones = torch.ones_like(module.running_mean)
            leaves = (ones, torch.zeros_like(ones), ones.new_ones(2))
            # The module's dictionary, unlike its parameters, is no part of the state dict, and is copied.
            module.__dict__["instance"] = InstanceBranch(*(leaf.requires_grad_() for leaf in leaves))
            _Assemble().register_first(module)
    if not assembled_norms(net):
        raise ValueError(f"{type(net).__name__} has no batch norm that keeps statistics; {WITH_BATCH_NORM}")
    return net


def assembled_norms(net: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norms that `assemble_norms` changed, by dotted name."""
    return {name: m for name, m in net.named_modules() if isinstance(m, _BatchNorm) and "instance" in vars(m)}


def place_branches(net: nn.Module) -> None:
    """Move the instance norms to the device of their batch norms; `net.to` does not move them.

    It makes new leaves: call it before the optimiser is made.
    """
    for norm in assembled_norms(net).values():
        assert norm.running_mean is not None
        leaves = vars(vars(norm)["instance"]).values()
        if any(leaf.device != norm.running_mean.device for leaf in leaves):
            placed = (leaf.detach().to(norm.running_mean.device).requires_grad_() for leaf in leaves)
            norm.__dict__["instance"] = InstanceBranch(*placed)


def copied_branches(net: nn.Module) -> dict[str, InstanceBranch]:
    """Return copies of a network's instance norms without a gradient, by dotted name."""
    return {
        name: InstanceBranch(*(leaf.detach().clone() for leaf in vars(vars(norm)["instance"]).values()))
        for name, norm in assembled_norms(net).items()
    }


@contextmanager
def with_branches(net: nn.Module, branches: Mapping[str, InstanceBranch]) -> Iterator[None]:
    """A context that replaces a network's instance norms, by dotted name."""
    norms = assembled_norms(net)
    before = {name: vars(norm)["instance"] for name, norm in norms.items()}
    try:
        for name, branch in branches.items():
            vars(norms[name])["instance"] = branch
        yield
    finally:
        for name, branch in before.items():
            vars(norms[name])["instance"] = branch


class _Assemble(PickledHook):
    def __call__(self, module: _BatchNorm, args: tuple[Any, ...], batch: Tensor) -> Tensor:
        x = args[0]
        if x.dim() < 3:
            return batch
        branch: InstanceBranch = vars(module)["instance"]

        def move(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
            return normalising(mean, (var + module.eps).sqrt(), branch.weight.to(mean), branch.bias.to(mean))

        instance = scale_by_moments(x, move)
        shares = branch.scores.to(x.device).softmax(dim=0).to(batch.dtype)
        return shares[0] * batch + shares[1] * instance
