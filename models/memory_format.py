"""Channels last in memory, for slices and for volumes."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from medfedaug.functional.passes import CHANNELS_LAST

Laid = TypeVar("Laid", Tensor, nn.Module)


def channels_last(value: Laid) -> Laid:
    """Return a batch of images, (B, C, *spatial), or a network's weights, with channels last.

    Convolutions are then a fifth faster on CPUs, and faster still on GPUs with tensor cores.
    """
    if isinstance(value, Tensor):
        return value.to(memory_format=CHANNELS_LAST[value.ndim]) if value.ndim in CHANNELS_LAST else value
    for dimensions, layout in CHANNELS_LAST.items():
        if any(parameter.ndim == dimensions for parameter in value.parameters()):
            value.to(memory_format=layout)  # type: ignore[call-overload]
    return value
