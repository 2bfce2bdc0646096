"""Where a network's features end and its head begins."""

from __future__ import annotations

from monai.networks.nets import DynUNet, MedNeXt
from torch import nn

__all__ = ["find_head"]

# MONAI's UNet without residual units ends with a transposed convolution.
_HEADS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# With deep supervision their coarser heads come after that of the finest output.
_FINEST = {DynUNet: "output_block.conv.conv", MedNeXt: "out_0.conv_out"}


def find_head(net: nn.Module, name: str | None = None) -> nn.Module:
    """The layer that turns features into logits; its input is what papers call the features.

    By default the last fully connected or convolutional layer in the order in which the network's modules
    were registered: the classifier of MONAI's and this library's networks, and the last convolution of
    their U-Nets; with deep supervision, of the finest output. MONAI's UNet with residual units adds another
    layer's output to that of its last convolution.

    Args:
        net: the network.
        name: dotted name of the module, where it is another one.

    Raises:
        ValueError: when there is no such module.

    Example:
        >>> from monai.networks.nets import resnet18
        >>> find_head(resnet18(spatial_dims=2, n_input_channels=3, num_classes=7))
        Linear(in_features=512, out_features=7, bias=True)
    """
    if name is not None:
        modules = dict(net.named_modules())
        if name not in modules or not name:
            last = ", ".join([n for n, m in modules.items() if isinstance(m, _HEADS)][-5:])
            raise ValueError(f"{type(net).__name__} has no module {name!r}; its last layers are {last}")
        return modules[name]
    for cls, finest in _FINEST.items():
        if isinstance(net, cls):
            return net.get_submodule(finest)
    heads = [module for module in net.modules() if isinstance(module, _HEADS)]
    if not heads:
        raise ValueError(f"{type(net).__name__} has no fully connected or convolutional layer as its head")
    return heads[-1]
