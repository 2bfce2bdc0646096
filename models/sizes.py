"""Sizes of images that a network takes."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from monai.networks.nets import (
    UNETR,
    AttentionUnet,
    DynUNet,
    FlexibleUNet,
    MedNeXt,
    SegResNet,
    SegResNetDS,
    SwinUNETR,
    UNet,
    VNet,
)
from torch import nn

_USUAL = 16  # four poolings
# The others pad images that do not fit, or are not known.
_STRICT = (UNet, AttentionUnet, DynUNet, SegResNet, SegResNetDS, SwinUNETR, VNet, MedNeXt, FlexibleUNet)


def size_multiple(net: nn.Module, spatial_dims: int) -> tuple[int, ...]:
    """Return, for each axis, the number of which an image's size must be a multiple.

    An unknown network is assumed to halve its images four times.

    Example:
        >>> size_multiple(UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, (2, 1))), 2)
        (4, 2)
    """
    multiple: Any = _USUAL
    if isinstance(net, (UNet, AttentionUnet, DynUNet)):
        return _product(net.strides, spatial_dims)
    if isinstance(net, SegResNetDS):
        return tuple(int(n) for n in net.shape_factor())
    if isinstance(net, SegResNet):
        multiple = 2 ** (len(net.down_layers) - 1)
    elif isinstance(net, MedNeXt):
        multiple = 2 ** len(net.down_blocks)
    elif isinstance(net, FlexibleUNet):
        multiple = 32
    elif isinstance(net, SwinUNETR):
        multiple = net.patch_size**5
    return (int(multiple),) * spatial_dims


def check_size(net: nn.Module, size: Sequence[int]) -> None:
    """Check that a network takes images of a size; an unknown network is assumed to take it.

    Example:
        >>> check_size(UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2)), (32, 30))
        Traceback (most recent call last):
        ValueError: images must have sizes that are multiples of 4 x 4, not 32 x 30
    """
    multiple, needed = size_multiple(net, len(size)), ""
    if isinstance(net, _STRICT) and any(n % m for n, m in zip(size, multiple, strict=True)):
        needed = f"sizes that are multiples of {_by(multiple)}"
    if isinstance(net, UNETR):
        made_for = tuple(n * m for n, m in zip(net.feat_size, net.patch_size, strict=True))
        needed = "" if made_for == tuple(size) else f"the size {_by(made_for)}"
    if needed:
        raise ValueError(f"images must have {needed}, not {_by(size)}")


def _by(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


def _product(strides: Iterable[Any], spatial_dims: int) -> tuple[int, ...]:
    by_axis = (s if isinstance(s, (tuple, list)) else (s,) * spatial_dims for s in strides)
    return tuple(math.prod(steps) for steps in zip(*by_axis, strict=True))
