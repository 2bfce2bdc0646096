"""Networks by name, with one argument for their normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from monai.networks.nets import BasicUNet, DenseNet, UNet, resnet18, resnet50
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug import plugins
from medfedaug.errors import ConfigError
from medfedaug.models.classifiers import SwinClassifier, ViTClassifier, alexnet, digits_cnn, lenet5

__all__ = ["build_network", "built_in_networks", "network_builder", "network_names"]

_NORMS = ("batch", "instance", "layer", "group")
_GROUPS = 8

Builder = Callable[..., nn.Module]
_NETWORKS: dict[str, Builder] = {}


def _register(name: str) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        _NETWORKS[name] = builder
        return builder

    return add


def built_in_networks() -> tuple[str, ...]:
    """The names that no other package may take."""
    return tuple(sorted(_NETWORKS))


def network_names() -> tuple[str, ...]:
    """Names that `build_network` knows; those that other packages add come last.

    Example:
        >>> "basicunet" in network_names()
        True
    """
    return (*built_in_networks(), *plugins.names(plugins.NETWORKS, built_in_networks()))


def build_network(
    name: str,
    *,
    spatial_dims: int = 2,
    in_channels: int = 1,
    out_channels: int = 2,
    norm: str | None = None,
    **args: Any,
) -> nn.Module:
    """Build a network, with batch norm or with another norm in its place.

    Segmentation: "basicunet" and "unet", MONAI's. The U-Net of the papers is, nearly,
    "basicunet" with `features=(32, 64, 128, 256, 512, 32)` and `act="relu"` (MONAI's default is a leaky one).

    Classification: "alexnet", "digits_cnn" and "lenet5" of the papers (`medfedaug.models.classifiers`),
    MONAI's "resnet18", "resnet50" and "densenet100" (growth rate 12), "swin_t" (needs the package einops),
    and "vit", by default a ViT-S/16 for images of 224 pixels (`img_size`).

    Other packages may add networks (`medfedaug.plugins`); theirs get the same arguments.

    Args:
        name: one of `network_names()`.
        spatial_dims: 2 or 3.
        in_channels: channels of the image.
        out_channels: channels of the output: the classes, including the background.
        norm: None for the network's own, which is batch norm in all but "swin_t" and "vit"; or "batch",
            "instance", "layer" or "group" in place of batch norm. Layer norm is over the channels and voxels
            of an image. Group norm has 8 groups, or as many as divide the number of channels. After a fully
            connected layer, where there are no voxels, "instance" is layer norm.
        **args: further arguments of the network, which replace the defaults chosen here; not `pretrained`,
            since a network is built from what a job says, and a job names no file and downloads none.

    Returns:
        The network. `medfedaug.models.insert_ffa` knows the stages of all but "vit".

    Raises:
        ValueError: when `name` or `norm` is unknown (lists what there is), `norm` is given for a network
            without batch norm, or `pretrained` is given.
        ConfigError: when another package adds the network, and it may not or cannot be used.

    Deviations:
        That U-Net has 7.78 million parameters (29.7 MB) and the papers' 7.76 (29.6 MB): MONAI's keeps 64
        channels in the last transposed convolution, where theirs has 32, and its convolutions have a bias,
        which the batch norm after them cancels. The papers compare batch, layer and group norm (FedFA+ Table
        8) and do not give the number of groups.

    Example:
        >>> net = build_network("basicunet", in_channels=1, out_channels=3, norm="group")
        >>> norm = net.down_1.convs.conv_0.adn.N
        >>> type(norm).__name__, norm.num_groups, norm.num_channels
        ('GroupNorm', 8, 32)
    """
    builder = _find(name)
    if norm is not None and norm not in _NORMS:
        raise ValueError(f"unknown norm '{norm}', known: {', '.join(_NORMS)}")
    if "pretrained" in args:
        raise ValueError("pretrained: weights are neither read from a file nor downloaded")
    net = builder(spatial_dims=spatial_dims, in_channels=in_channels, out_channels=out_channels, **args)
    if not isinstance(net, nn.Module):
        raise ValueError(f"'{name}' gives {type(net).__name__}, and a torch.nn.Module is needed")
    if norm is not None and not any(isinstance(m, _BatchNorm) for m in net.modules()):
        raise ValueError(f"'{name}' has no batch norm that could be replaced: leave norm out")
    if norm is not None and norm != "batch":
        _replace_batch_norm(net, norm)
    return net


def _find(name: str) -> Builder:
    plugin = plugins.find(plugins.NETWORKS, name, built_in_networks())
    if plugin is not None:
        return network_builder(plugin)
    if name not in _NETWORKS:
        raise ValueError(f"unknown network '{name}', known: {', '.join(network_names())}")
    return _NETWORKS[name]


def network_builder(plugin: plugins.Plugin) -> Builder:
    """The function, or class, with which a package builds a network.

    Raises:
        ConfigError: naming the package, when it cannot be loaded or cannot be called.
    """
    found = plugin.load()
    if not callable(found):
        raise ConfigError(f"{plugin.what}: {found!r} cannot be called to build a network")
    return found


def _replace_batch_norm(net: nn.Module, norm: str) -> None:
    # Replacing afterwards works alike for every network; the networks' own `norm` arguments differ, and
    # MONAI's group norm takes one number of groups for all widths, of which the last layer of a U-Net has 2.
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm):
                module.register_module(name, _other_norm(child, norm))


def _other_norm(batch_norm: _BatchNorm, norm: str) -> nn.Module:
    width = batch_norm.num_features
    if norm == "instance":
        if isinstance(batch_norm, nn.BatchNorm2d):
            return nn.InstanceNorm2d(width, affine=True)
        if isinstance(batch_norm, nn.BatchNorm3d):
            return nn.InstanceNorm3d(width, affine=True)
    return nn.GroupNorm(math.gcd(_GROUPS, width) if norm == "group" else 1, width)


@_register("basicunet")
def _basicunet(**args: Any) -> nn.Module:
    return BasicUNet(**{"features": (16, 32, 64, 128, 256, 16), "norm": "batch", **args})


@_register("unet")
def _unet(**args: Any) -> nn.Module:
    defaults = {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2), "num_res_units": 2}
    return UNet(**{**defaults, "norm": "batch", **args})


@_register("alexnet")
def _alexnet(**args: Any) -> nn.Module:
    return alexnet(**args)


@_register("digits_cnn")
def _digits_cnn(**args: Any) -> nn.Module:
    return digits_cnn(**args)


@_register("lenet5")
def _lenet5(**args: Any) -> nn.Module:
    return lenet5(**args)


def _monai_resnet(make: Builder, in_channels: int, out_channels: int, args: dict[str, Any]) -> nn.Module:
    # Of MONAI's own defaults, one keeps the resolution and one has a bias where batch norm follows.
    defaults = {"conv1_t_stride": 2, "bias_downsample": False}
    return make(n_input_channels=in_channels, num_classes=out_channels, **{**defaults, **args})


@_register("resnet18")
def _resnet18(*, in_channels: int, out_channels: int, **args: Any) -> nn.Module:
    return _monai_resnet(resnet18, in_channels, out_channels, args)


@_register("resnet50")
def _resnet50(*, in_channels: int, out_channels: int, **args: Any) -> nn.Module:
    return _monai_resnet(resnet50, in_channels, out_channels, args)


@_register("densenet100")
def _densenet100(**args: Any) -> nn.Module:
    # DenseNet-BC with L = 100, k = 12 (Huang et al., CVPR 2017): three blocks of 16 layers.
    defaults = {"init_features": 24, "growth_rate": 12, "block_config": (16, 16, 16)}
    return DenseNet(**{**defaults, **args})


@_register("vit")
def _vit(*, out_channels: int, **args: Any) -> nn.Module:
    defaults = {"img_size": 224, "patch_size": 16, "hidden_size": 384, "mlp_dim": 1536, "num_heads": 6}
    return ViTClassifier(num_classes=out_channels, **{**defaults, **args})


@_register("swin_t")
def _swin_t(**args: Any) -> nn.Module:
    return SwinClassifier(**args)
