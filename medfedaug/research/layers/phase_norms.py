"""Norms that keep the phases of features (DAC-SC): after stages, and in the shortcuts of residual blocks."""

from typing import Any, TypeVar

import torch
from monai.networks.blocks.dynunet_block import UnetResBlock
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug.functional import working_precision
from medfedaug.models.adaptation import UnsavedModule
from medfedaug.models.hooks import PickledHook
from medfedaug.models.stage_layer import StageLayer
from medfedaug.research.functional.phases import control_content, control_style

Network = TypeVar("Network", bound=nn.Module)


class StyleControlNorm(UnsavedModule, StageLayer):
    """Mix normalised features and the features themselves, in training and in evaluation (SCNorm).

    ::

        x̂ = γ (s₁ IN(x) + s₂ x) + β,   s = softmax(h / T)

    by `medfedaug.research.functional.phases.control_style`. γ, β and h are parameters of the network and
    trained with it, but no entries of its state dict.

    Args:
        num_channels: number of channels C.
        temperature: T.
        eps: added to the spatial variance before its root.

    Example:
        >>> norm = StyleControlNorm(2)
        >>> norm(torch.rand(4, 2, 8, 8)).shape, len(norm.state_dict()), len(list(norm.parameters()))
        (torch.Size([4, 2, 8, 8]), 0, 3)
    """

    kind = "SCNorm"
    slug = "scnorm"

    def __init__(self, num_channels: int, temperature: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__(num_channels)
        self.temperature, self.eps = float(temperature), float(eps)
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.scores = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in part."""
        shares = (self.scores / self.temperature).softmax(dim=0)
        return control_style(x, shares, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, temperature={self.temperature}, eps={self.eps}"


def shortcut_norms(net: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norms at the ends of residual blocks' shortcuts, by dotted name.

    The blocks are MONAI's and torchvision's ResNet blocks with a ``downsample`` of several layers, and the
    blocks of MONAI's DynUNet.
    """
    names = {id(module): name for name, module in net.named_modules()}
    norms = {}
    for module in net.modules():
        path = getattr(module, "downsample", None)
        if isinstance(module, UnetResBlock):
            norm = module.norm3 if path else None
        else:
            norm = path[-1] if isinstance(path, nn.Sequential) and len(path) else None
        if isinstance(norm, _BatchNorm):
            norms[names[id(norm)]] = norm
    return norms


def control_shortcuts(net: Network, content: float = 0.5) -> Network:
    """Replace the batch norms in the shortcuts of residual blocks by CCNorm.

    The modules keep their names, parameters and statistics: their output passes through
    `medfedaug.research.functional.phases.control_content`. A network without normalised shortcuts stays as
    it is.

    Args:
        net: changed in place.
        content: λ, from 0, which keeps the phases, to 1, which is the batch norm itself.
    """
    for norm in shortcut_norms(net).values():
        _ControlContent(content).register_first(norm)
    return net


class _ControlContent(PickledHook):
    def __init__(self, content: float) -> None:
        self.content = content

    def __call__(self, norm: _BatchNorm, args: tuple[Any, ...], output: Tensor) -> Tensor:
        (x,) = args
        if norm.training or norm.running_mean is None:
            mean = working_precision(x.detach()).mean((0, *range(2, x.dim())))
        else:
            mean = norm.running_mean
        return control_content(x, output, mean, self.content, norm.bias)
