"""The memory layout of a network's weights: channels last where training is measured to be faster."""

from collections import Counter
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from medfedaug.functional.passes import CHANNELS_LAST

Network = TypeVar("Network", bound=nn.Module)

_NORMS = {_BatchNorm: "batch", _InstanceNorm: "instance", nn.GroupNorm: "group"}

FASTER_LAST: dict[tuple[str, str, int], bool] = {  # the time channels last, divided by contiguous
    ("cpu", "batch", 2): True,  # 0.91
    ("cpu", "instance", 2): False,  # 1.07
    ("cpu", "group", 2): True,  # 0.92
    ("cpu", "batch", 3): False,  # 1.16
    ("cpu", "instance", 3): False,  # 1.00
    ("cpu", "group", 3): False,  # 1.07
}
"""Gain of 3 % or more by channels last, by type of device, norm and spatial dimensions.

``python benchmarks/layouts.py`` measures it, and ``docs/measurements.md`` has the numbers.
"""


def norm_of(network: nn.Module) -> str:
    """Return the kind of the most frequent norm layer; ``"none"`` without one."""
    kinds = Counter(
        name for module in network.modules() for kind, name in _NORMS.items() if isinstance(module, kind)
    )
    return kinds.most_common(1)[0][0] if kinds else "none"


def is_faster_last(network: nn.Module, device: str) -> bool:
    """Return whether a network trains faster channels last on a type of device; ``False`` if not measured."""
    dimensions = _dimensions(network)
    return FASTER_LAST.get((device, norm_of(network), dimensions), False)


def lay_out(network: Network) -> Network:
    """Give the weights of a network on its device the faster layout, in place.

    Convolutions lay out features as their weights are. A network that was not measured keeps its own layout.
    """
    device = next((parameter.device.type for parameter in network.parameters()), "cpu")
    if is_faster_last(network, device):
        network.to(memory_format=CHANNELS_LAST[_dimensions(network) + 2])  # type: ignore[call-overload]
    return network


def _dimensions(network: nn.Module) -> int:
    counts = Counter(m.weight.ndim - 2 for m in network.modules() if isinstance(m, _ConvNd))
    return counts.most_common(1)[0][0] if counts else 0
