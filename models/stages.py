"""Where the encoder stages of MONAI's networks end.

FFA layers go after each stage of the encoder, after its pooling where it has one, and never into a skip
connection (FedFA+ section 3.2.6 and Fig. 1). What that means in the modules of a network is written down
here, one function a network class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from monai.networks.layers.simplelayers import SkipConnection
from monai.networks.nets import BasicUNet, UNet
from torch import nn

__all__ = ["Stage", "known_stages", "supported_networks"]


@dataclass(frozen=True)
class Stage:
    """One place for an FFA layer.

    Args:
        name: name of the stage, "enc1" for the first of the encoder.
        module: dotted name of the module in the network.
        side: whether the features are the module's output or its input.
        channels: number of channels of the features.
    """

    name: str
    module: str
    side: Literal["output", "input"]
    channels: int


def _named(places: list[tuple[str, Literal["output", "input"], int]]) -> list[Stage]:
    return [Stage(f"enc{i}", *place) for i, place in enumerate(places, start=1)]


def _name_of(net: nn.Module, module: nn.Module) -> str:
    return next(name for name, candidate in net.named_modules() if candidate is module)


def _basic_unet(net: Any) -> list[Stage]:
    # The output of a `down` block is also a skip connection, the output of the pooling within the next is
    # not.
    features = [getattr(net, f"down_{i}").convs.conv_0.conv.in_channels for i in (1, 2, 3, 4)]
    bottleneck = net.down_4.convs.conv_1.conv.out_channels
    return _named(
        [(f"down_{i}.max_pooling", "output", width) for i, width in enumerate(features, start=1)]
        + [("down_4", "output", bottleneck)]
    )


def _unet(net: Any) -> list[Stage]:
    # `model` nests as down, SkipConnection(rest), up: the input of `rest` is the stage's output apart from
    # the skip.
    inner = [m.submodule for m in net.model.modules() if isinstance(m, SkipConnection)]
    names = [_name_of(net, m) for m in inner]
    return _named(
        [(name, "input", width) for name, width in zip(names, net.channels, strict=False)]
        + [(names[-1], "output", net.channels[-1])]
    )


_STAGES: dict[type[nn.Module], Callable[[Any], list[Stage]]] = {
    BasicUNet: _basic_unet,
    UNet: _unet,
}


def known_stages(net: nn.Module) -> list[Stage] | None:
    """The encoder stages of a network, in order; None for a network that is not known."""
    for cls in type(net).__mro__:
        if cls in _STAGES:
            return _STAGES[cls](net)
    return None


def supported_networks() -> tuple[str, ...]:
    """Names of the network classes whose stages are known."""
    return tuple(cls.__name__ for cls in _STAGES)
