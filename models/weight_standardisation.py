"""Convolutions with standardised weights, and no normalisation of features (FedWon)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from medfedaug.functional import working_precision
from medfedaug.models.hooks import PickledHook

Network = TypeVar("Network", bound=nn.Module)

RELU_GAIN = math.sqrt(2) / math.sqrt(1 - 1 / math.pi)
"""γ for which a ReLU keeps the variance of its input."""


def standardised(weight: Tensor, gain: float = RELU_GAIN, eps: float = 1e-4) -> Tensor:
    r"""Scaled weight standardisation (Brock, De and Smith, ICLR 2021; FedWon).

    ::

        Ŵᵢ = γ (Wᵢ − μᵢ) / (σᵢ √N)

    with the mean μᵢ and the population deviation σᵢ of the N weights of output
    channel i.

    Args:
        weight: (channels out, channels in, \*kernel).
        gain: γ.
        eps: the least ``σᵢ² N``.

    Returns:
        The weights, of the shape and dtype of ``weight``.

    Example:
        >>> standardised(torch.tensor([[1.0, 3.0]]), gain=1.0)
        tensor([[-0.7071,  0.7071]])
    """
    w = working_precision(weight)
    over = list(range(1, w.dim()))
    centred = w - w.mean(dim=over, keepdim=True)
    squares = centred.square().sum(dim=over, keepdim=True)  # σ² N
    return (gain * centred * squares.clamp_min(eps).rsqrt()).to(weight.dtype)


def by_output_channel(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a parameter of a module, or its gradient, with the output channels first.

    The weights of a transposed convolution with G groups, (in, out/G, *kernel), become (out, in/G, *kernel),
    as in other convolutions; any other parameter stays as it is. A second call undoes the first.
    """
    if not isinstance(module, _ConvTransposeNd) or weight.dim() < 2:
        return weight
    rows, columns, *kernel = weight.shape
    grouped = weight.reshape(module.groups, rows // module.groups, columns, *kernel)
    return grouped.transpose(1, 2).reshape(module.groups * columns, rows // module.groups, *kernel)


def remove_norms(net: Network) -> int:
    """Make batch, instance and group norms identities, in place, and return their number; entries stay."""
    norms = [module for module in net.modules() if isinstance(module, (_NormBase, nn.GroupNorm))]
    for module in norms:
        module.forward = _same  # type: ignore[method-assign]
    return len(norms)


def standardise_weights(net: Network, gain: float = RELU_GAIN, leave: Iterable[nn.Module] = ()) -> int:
    """Let convolutions, transposed ones too, use `standardised` weights; return their number.

    Training changes the weights themselves. A convolution with a single weight for each output channel has
    nothing to standardise, and stays as it is.

    Args:
        net: changed in place; its entries stay.
        gain: γ.
        leave: modules that stay as they are.
    """
    left, number = set(leave), 0
    for module in net.modules():
        if not isinstance(module, _ConvNd) or module in left:
            continue
        if module.weight.numel() > module.out_channels:
            hook = _Standardise(gain)
            module.register_forward_pre_hook(hook)
            hook.handle = module.register_forward_hook(_put_back, always_call=True)  # the later of both
            number += 1
    return number


def _same(features: Tensor) -> Tensor:
    return features


class _Standardise(PickledHook):
    """Give a convolution the standardised weights, until `_put_back`.

    They are an attribute of the module, which Python finds before its parameters; the order of parameters
    stays. In a replica of `DataParallel` the weights are an attribute, too, which `_put_back` restores.
    """

    def __init__(self, gain: float) -> None:
        self.gain = gain

    def __call__(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        assert isinstance(module.weight, Tensor)
        weight, attributes = module.weight, vars(module)
        attributes[_ATTRIBUTE] = attributes.get("weight")
        by_channel = standardised(by_output_channel(module, weight), self.gain)
        attributes["weight"] = by_output_channel(module, by_channel)


_ATTRIBUTE = "weight_as_given"


def _put_back(module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
    attributes = vars(module)
    if _ATTRIBUTE in attributes:
        attribute = attributes.pop(_ATTRIBUTE)
        if attribute is None:
            del attributes["weight"]
        else:
            attributes["weight"] = attribute


def clip_by_weights(weight: Tensor, gradient: Tensor, ratio: float, eps: float = 1e-3) -> Tensor:
    """Adaptive gradient clipping (Brock et al., ICML 2021, Eq. 3).

    ::

        Gᵢ ← λ (max(‖Wᵢ‖, ε) / ‖Gᵢ‖) Gᵢ   where ‖Gᵢ‖ / max(‖Wᵢ‖, ε) > λ

    for each output channel i; a vector counts as one channel.

    Args:
        weight: W, (channels out, ...), see `by_output_channel`, or a vector.
        gradient: G, of the same shape.
        ratio: λ.
        eps: ε.

    Example:
        >>> clip_by_weights(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 10.0]]), ratio=0.5)
        tensor([[0.0000, 2.5000]])
    """
    over = list(range(min(1, weight.dim() - 1), weight.dim()))
    largest = ratio * weight.square().sum(dim=over, keepdim=True).sqrt().clamp_min(eps)
    length = gradient.square().sum(dim=over, keepdim=True).sqrt()
    return torch.where(length > largest, gradient * (largest / length), gradient)
