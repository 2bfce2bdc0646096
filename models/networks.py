"""Networks by name, with one argument for their normalisation; the sizes of images that they take."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monai.networks import nets
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug.models.classifiers import SwinClassifier, ViTClassifier, alexnet, lenet5
from medfedaug.models.supervision import SUPERVISED, supervision_arguments
from medfedaug.utils import plugins
from medfedaug.utils.class_paths import check_arguments, constructor_parameters, public_class
from medfedaug.utils.validation import check_choice, not_known

_NORMS = ("batch", "instance", "layer", "group")
_GROUPS = 8
# The norms of `_replace_batch_norm` as arguments of MONAI's networks.
_MONAI_NORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "instance": ("instance", {"affine": True}),
    "layer": ("group", {"num_groups": 1}),
    "group": ("group", {"num_groups": _GROUPS}),
}

# Names of one argument in MONAI's networks.
_IN_CHANNELS = ("in_channels", "n_input_channels")
_OUT_CHANNELS = ("out_channels", "num_classes")
_NORM = ("norm", "norm_name", "norm_type")

_USUAL = 16  # four poolings
# The others pad images that do not fit, or are not known.
_STRICT = (
    nets.UNet,
    nets.AttentionUnet,
    nets.DynUNet,
    nets.SegResNet,
    nets.SegResNetDS,
    nets.SwinUNETR,
    nets.VNet,
    nets.MedNeXt,
    nets.FlexibleUNet,
)

Builder = Callable[..., nn.Module]
_NETWORKS: dict[str, Builder] = {}


class MonaiNetwork:
    """Builder of a network of MONAI by a class, or a function, and arguments instead of MONAI's defaults."""

    def __init__(self, cls: Any, **defaults: Any) -> None:
        self.cls, self.defaults = cls, defaults
        self.parameters = constructor_parameters(cls)

    @property
    def norm_argument(self) -> str | None:
        """The name of the network's argument for its normalisation; None if it has none."""
        return self._name(_NORM)

    def __call__(self, **args: Any) -> nn.Module:
        """Build the network; arguments as of `arguments`."""
        network: nn.Module = self.cls(**self.arguments(**args))
        return network

    def arguments(
        self, *, spatial_dims: int, in_channels: int, out_channels: int, image_size: Any = None, **args: Any
    ) -> dict[str, Any]:
        """Return the keyword arguments of the class."""
        values = {**self.defaults, **args}
        sizes = {("spatial_dims",): spatial_dims, _IN_CHANNELS: in_channels, _OUT_CHANNELS: out_channels}
        for names, value in sizes.items():
            name = self._name(names)
            if name is None:  # a class with other arguments may do anything with those it knows
                raise ValueError(f"{self.cls.__name__} has no argument {names[0]}, and cannot be named")
            if name in args:
                raise ValueError(f"{name} follows from the data; leave it out")
            values[name] = value
        if image_size is not None and "img_size" in self.parameters:
            values.setdefault("img_size", image_size)
        if "pretrained" in self.parameters:  # some networks have it on by default
            values["pretrained"] = False
        sized = self.parameters.get("img_size")
        if sized is not None and sized.default is sized.empty and "img_size" not in values:
            raise ValueError(f"{self.cls.__name__} needs images of one size: --image-size")
        return values

    def _name(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self.parameters), None)


class ClassifierBuilder:
    """Builder of a classification network by a function or class.

    ``cls`` is the class whose signature lists the arguments, by default ``build``; ``names`` are the other
    names that ``build`` has for channels and classes; ``defaults`` replace the defaults of ``cls``.
    """

    task = "classification"

    def __init__(
        self, build: Builder, cls: Any = None, names: Mapping[str, str] = {}, **defaults: Any
    ) -> None:
        self.build, self.cls, self.names, self.defaults = build, cls or build, names, defaults

    def __call__(self, **args: Any) -> nn.Module:
        arguments = {**self.defaults, **args}
        return self.build(**{self.names.get(name, name): value for name, value in arguments.items()})


def built_in_networks() -> tuple[str, ...]:
    """Return the names that no other package may use."""
    return tuple(sorted(_NETWORKS))


def supervises(name: str) -> bool:
    """Return whether a network has heads at several levels (`medfedaug.models.supervision`)."""
    builder = _NETWORKS.get(name) or (find_builder(name)[0] if "." in name else None)
    return isinstance(builder, MonaiNetwork) and builder.cls in SUPERVISED


def network_names() -> tuple[str, ...]:
    """Return the names that `build_network` knows; names from other packages come last."""
    return (*built_in_networks(), *plugins.names(plugins.NETWORKS, built_in_networks()))


def build_network(
    name: str,
    *,
    spatial_dims: int = 2,
    in_channels: int = 1,
    out_channels: int = 2,
    norm: Any = None,
    image_size: Any = None,
    supervised: bool = False,
    **args: Any,
) -> nn.Module:
    """Build a network with its own or with another norm.

    Segmentation: MONAI's networks by the names of their classes in small letters: "basicunet", "dynunet",
    "mednext", "segresnet", "segresnetds", "swinunetr" and "unetr" (both need the package einops), and "unet".
    The U-Net of the papers is, nearly, "basicunet" with `features=(32, 64, 128, 256, 512, 32)` and
    `act="relu"` (MONAI's default is a leaky one).

    Classification: "alexnet" and "lenet5" of the papers (`medfedaug.models.classifiers`),
    MONAI's "resnet18", "resnet50" and "densenet100" (growth rate 12), "swin_t" and "vit", by default a
    ViT-S/16 for images of 224 pixels (`img_size`); both need the package einops.

    Any other network of MONAI has its class path as name, and MONAI's defaults:
    "monai.networks.nets.HighResNet". Other packages may add networks (`medfedaug.utils.plugins`), which get
    the same arguments.

    Args:
        name: one of `network_names()`, or a class path.
        spatial_dims: 2 or 3.
        in_channels: channels of the image.
        out_channels: channels of the output: the classes, including the background.
        norm: None for the network's norm (the table in ``docs/networks.md``); or "batch", "instance", "layer"
            or "group" instead: a network with an argument for its norm is built with batch norm, and every
            batch norm is replaced. Layer norm is over the channels and voxels of an image. Group norm has 8
            groups, or as many as divide the number of channels. After a fully connected layer, which has no
            voxels, "instance" is layer norm. Anything else than text, such as
            `("group", {"num_groups": 4})`, is the network's argument.
        image_size: common size of all images, if they have one: MONAI's networks that are made for one size
            ("unetr") take it, unless `img_size` is an argument.
        supervised: add heads at several levels of the decoder
            (`medfedaug.models.supervision.supervision_arguments`), unless ``args`` say otherwise.
        **args: further arguments of the network, which replace the defaults of this package. Arguments that
            name a file, such as `pretrained`, are refused: a job names no file and downloads none.

    Returns:
        The network. `medfedaug.models.insert_ffa` knows the stages of all names but "vit".

    Raises:
        ValueError: when `name` is unknown (lists the known ones), the network can have no batch norm to
            replace, or an argument is missing, unknown or not allowed.
        ConfigError: when `norm` is unknown (lists the known ones), or another package adds the network, and
            it may not or cannot be used.

    Deviations:
        That U-Net has 7.78 million parameters (29.7 MB) and the papers' 7.76 (29.6 MB): MONAI's has 64
        channels in the last transposed convolution, the papers' 32, and its convolutions have a bias, which
        the batch norm after them cancels. The papers compare batch, layer and group norm (FedFA+ Table 8)
        without the number of groups.

    Example:
        >>> net = build_network("basicunet", in_channels=1, out_channels=3, norm="group")
        >>> norm = net.down_1.convs.conv_0.adn.N
        >>> type(norm).__name__, norm.num_groups, norm.num_channels
        ('GroupNorm', 8, 32)
    """
    builder, norm, args = _resolve(name, norm, image_size, args, supervised)
    net = builder(spatial_dims=spatial_dims, in_channels=in_channels, out_channels=out_channels, **args)
    if norm is not None and not any(isinstance(m, _BatchNorm) for m in net.modules()):
        raise ValueError(f"'{name}' has no batch norm that could be replaced: leave norm out")
    if norm is not None and norm != "batch":
        _replace_batch_norm(net, norm)
    return net


def network_definition(
    name: str, *, norm: Any = None, image_size: Any = None, supervised: bool = False, **args: Any
) -> dict[str, Any]:
    """Return MONAI's class of a network, as ``_target_``, and its arguments, as in a MONAI Bundle.

    The arguments are as for `build_network`. A norm instead of batch norm becomes the network's argument
    in MONAI's terms. The network is the same, unless group norm has fewer than 8 groups in a layer; to be
    sure, compare outputs. A network that is not a class of MONAI is refused.

    Example:
        >>> sizes = {"spatial_dims": 2, "in_channels": 1, "out_channels": 3}
        >>> definition = network_definition("basicunet", norm="layer", **sizes)
        >>> definition["_target_"], definition["norm"]
        ('monai.networks.nets.BasicUNet', ('group', {'num_groups': 1}))
    """
    builder, norm, args = _resolve(name, norm, image_size, args, supervised)
    if not isinstance(builder, MonaiNetwork) or not inspect.isclass(builder.cls):
        raise ValueError(f"'{name}' is not a class of MONAI")
    if norm in _MONAI_NORMS:
        args[builder.norm_argument or "norm"] = _MONAI_NORMS[norm]
    return {"_target_": f"{nets.__name__}.{builder.cls.__name__}", **builder.arguments(**args)}


def _resolve(
    name: str, norm: Any, image_size: Any, args: dict[str, Any], supervised: bool
) -> tuple[Builder, str | None, dict[str, Any]]:
    """Return the network's builder, the norm instead of batch norm, and the other arguments."""
    builder, built_in = find_builder(name)
    args = dict(args)
    norm_argument = getattr(builder, "norm_argument", None)
    if norm is not None and not isinstance(norm, str) and norm_argument:
        args[norm_argument], norm = norm, None
    if norm is not None:
        check_choice("norm", norm, _NORMS)
        args = {**args, norm_argument: "batch"} if norm_argument else args
    check_arguments(args if built_in else {key: args[key] for key in args if key == "pretrained"})
    if supervised:
        defaults = getattr(builder, "defaults", {})
        args = {**supervision_arguments(getattr(builder, "cls", None), {**defaults, **args}), **args}
    if isinstance(builder, MonaiNetwork):
        args["image_size"] = image_size
    return builder, norm, args


def find_builder(name: str) -> tuple[Builder, bool]:
    """Return the builder of a named network, and whether it belongs to this package."""
    plugin = plugins.find(plugins.NETWORKS, name, built_in_networks())
    if plugin is not None:
        return plugin.load(), False
    if name in _NETWORKS:
        return _NETWORKS[name], True
    if "." in name:
        return MonaiNetwork(public_class(nets, name, "network")), True
    raise ValueError(
        f"'{name}' {not_known(name, network_names())}, and MONAI's by class path, for instance "
        "monai.networks.nets.HighResNet"
    )


def _replace_batch_norm(net: nn.Module, norm: str) -> None:
    # Replacement works for every network, while the `norm` arguments of networks differ. MONAI's group norm
    # takes one number of groups for all widths, and the last layer of a U-Net has width 2.
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm):
                module.register_module(name, _replacement_norm(child, norm))


def _replacement_norm(batch_norm: _BatchNorm, norm: str) -> nn.Module:
    width = batch_norm.num_features
    if norm == "instance":
        if isinstance(batch_norm, nn.BatchNorm2d):
            return nn.InstanceNorm2d(width, affine=True)
        if isinstance(batch_norm, nn.BatchNorm3d):
            return nn.InstanceNorm3d(width, affine=True)
    return nn.GroupNorm(math.gcd(_GROUPS, width) if norm == "group" else 1, width)


_CHANNELS, _STRIDES = (16, 32, 64, 128, 256), (2, 2, 2, 2)
_FEATURES = (*_CHANNELS, 16)

_NETWORKS.update(
    basicunet=MonaiNetwork(nets.BasicUNet, features=_FEATURES, norm="batch"),
    dynunet=MonaiNetwork(
        nets.DynUNet, kernel_size=(3,) * 5, strides=(1, *_STRIDES), upsample_kernel_size=_STRIDES
    ),
    mednext=MonaiNetwork(nets.MedNeXt),
    segresnet=MonaiNetwork(nets.SegResNet),
    segresnetds=MonaiNetwork(nets.SegResNetDS),
    swinunetr=MonaiNetwork(nets.SwinUNETR),
    unet=MonaiNetwork(nets.UNet, channels=_CHANNELS, strides=_STRIDES, num_res_units=2, norm="batch"),
    unetr=MonaiNetwork(nets.UNETR),
)


# MONAI's defaults keep the resolution in the first convolution and add a bias before a batch norm.
_RESNET: dict[str, Any] = {"conv1_t_stride": 2, "bias_downsample": False}
# DenseNet-BC with L = 100, k = 12 (Huang et al., CVPR 2017): three blocks of 16 layers.
_DENSENET: dict[str, Any] = {"init_features": 24, "growth_rate": 12, "block_config": (16, 16, 16)}
_VIT: dict[str, Any] = {"img_size": 224, "patch_size": 16}
_VIT |= {"hidden_size": 384, "mlp_dim": 1536, "num_heads": 6}
_CLASSES = {"out_channels": "num_classes"}
_RESNET_NAMES = {"in_channels": "n_input_channels", **_CLASSES}

_NETWORKS.update(
    alexnet=ClassifierBuilder(alexnet),
    densenet100=ClassifierBuilder(nets.DenseNet, **_DENSENET),
    lenet5=ClassifierBuilder(lenet5),
    resnet18=ClassifierBuilder(nets.resnet18, nets.ResNet, _RESNET_NAMES, **_RESNET),
    resnet50=ClassifierBuilder(nets.resnet50, nets.ResNet, _RESNET_NAMES, **_RESNET),
    swin_t=ClassifierBuilder(SwinClassifier),
    vit=ClassifierBuilder(ViTClassifier, names=_CLASSES, **_VIT),
)


def size_multiple(net: nn.Module, spatial_dims: int) -> tuple[int, ...]:
    """Return, for each axis, the number of which an image's size must be a multiple.

    An unknown network is assumed to halve its images four times.

    Example:
        >>> size_multiple(nets.UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, (2, 1))), 2)
        (4, 2)
    """
    multiple: Any = _USUAL
    if isinstance(net, (nets.UNet, nets.AttentionUnet, nets.DynUNet)):
        by_axis = (s if isinstance(s, (tuple, list)) else (s,) * spatial_dims for s in net.strides)
        return tuple(math.prod(steps) for steps in zip(*by_axis, strict=True))
    if isinstance(net, nets.SegResNetDS):
        return tuple(int(n) for n in net.shape_factor())
    if isinstance(net, nets.SegResNet):
        multiple = 2 ** (len(net.down_layers) - 1)
    elif isinstance(net, nets.MedNeXt):
        multiple = 2 ** len(net.down_blocks)
    elif isinstance(net, nets.FlexibleUNet):
        multiple = 32
    elif isinstance(net, nets.SwinUNETR):
        multiple = net.patch_size**5
    return (int(multiple),) * spatial_dims


def check_size(net: nn.Module, size: Sequence[int]) -> None:
    """Check that a network takes images of a size; an unknown network is assumed to take it.

    Example:
        >>> check_size(nets.UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2)), (32, 30))
        Traceback (most recent call last):
        ValueError: images must have sizes that are multiples of 4 x 4, not 32 x 30
    """
    multiple, needed = size_multiple(net, len(size)), ""
    if isinstance(net, _STRICT) and any(n % m for n, m in zip(size, multiple, strict=True)):
        needed = f"sizes that are multiples of {_by(multiple)}"
    if isinstance(net, nets.UNETR):
        made_for = tuple(n * m for n, m in zip(net.feat_size, net.patch_size, strict=True))
        needed = "" if made_for == tuple(size) else f"the size {_by(made_for)}"
    if needed:
        raise ValueError(f"images must have {needed}, not {_by(size)}")


def _by(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))
