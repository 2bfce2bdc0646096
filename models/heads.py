"""Find the head of a network, after its features."""

from monai.networks.nets import DynUNet, MedNeXt, UNet
from torch import nn

_HEADS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# DynUNet and MedNeXt register coarser heads after the finest one. The last block of UNet is a transposed
# convolution and, with residual units, a convolution.
_HEAD_NAMES = {DynUNet: "output_block.conv.conv", MedNeXt: "out_0.conv_out", UNet: "model.2"}


def find_head(net: nn.Module) -> nn.Module:
    """Return the layer that turns features into logits; its input is the papers' feature vector.

    It is the last fully connected or convolutional layer in the order of registration: the
    classifier of MONAI's and this library's networks, and the last convolution of their U-Nets, for the
    finest output with deep supervision. For MONAI's UNet it is the last block, which has several layers if
    the network has residual units.

    Example:
        >>> from monai.networks.nets import resnet18
        >>> find_head(resnet18(spatial_dims=2, n_input_channels=3, num_classes=7))
        Linear(in_features=512, out_features=7, bias=True)
    """
    for cls, head in _HEAD_NAMES.items():
        if isinstance(net, cls):
            return net.get_submodule(head)
    return [module for module in net.modules() if isinstance(module, _HEADS)][-1]
