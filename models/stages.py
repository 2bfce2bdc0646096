"""Find the ends of the encoder stages of MONAI's networks, and their heads; bases of layers between.

Layers go after each stage of the encoder, after its pooling if it has one, and never into a skip connection
(FedFA+ section 3.2.6 and Fig. 1). One function per network class returns these places. Where the features of
a stage are both a skip connection and an input of the next stage, the place is that input.

The layer needs the channels in second place. Networks whose features are tokens, (B, N, C), have no entry;
UNETR has one place: its decoder receives the transformer's last tokens as a feature map.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from monai.networks import nets
from monai.networks.layers.simplelayers import SkipConnection
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from medfedaug.models.classifiers import StagedClassifier, SwinClassifier


class StageLayer(nn.Module):
    """A layer on the features of a stage, (B, C, *spatial).

    It adds nothing to the network's state dict: buffers are not persistent, and parameters are not entries.

    Args:
        num_channels: number of channels C.

    Attributes:
        stage: name of the stage; empty until the layer is inserted.
        stage_index: position among the inserted layers, counted from 1; 0 for a layer in a network's code.
    """

    kind: ClassVar[str]
    """Name of the layer in messages."""
    slug: ClassVar[str]
    """The name of its module in the network."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.stage = ""
        self.stage_index = 0


class PickledHook:
    """A hook that holds its handle, so that it stays when its network is unpickled in another process.

    PyTorch numbers hooks in each process, and unpickles the hooks of a module with their numbers. A hook that
    is registered later could get the same number and replace the first one silently; an unpickled handle
    reserves the number.
    """

    handle: RemovableHandle | None = None

    def register_first(self, module: nn.Module) -> None:
        """Register the hook before a module's other forward hooks, which then see its result."""
        hook: Any = self
        self.handle = module.register_forward_hook(hook, prepend=True)


Side = Literal["output", "input"]


@dataclass(frozen=True)
class Stage:
    """Place for a layer after an encoder stage."""

    name: str  # name of the stage, "enc1" for the first of the encoder
    module: str  # dotted name of the module in the network
    side: Side  # whether the features are the module's output or its input
    channels: int  # number of channels of the features

    def watch(self, net: nn.Module, see: Callable[[Tensor], None]) -> RemovableHandle:
        """Call a function with the stage's features in every pass, until the handle is removed."""
        module = net.get_submodule(self.module)
        if self.side == "output":
            return module.register_forward_hook(lambda _module, _args, output: see(output))
        return module.register_forward_pre_hook(lambda _module, args: see(args[0]))


def output_channels(module: nn.Module) -> int | None:
    """Return the channels after a module's last convolution or normalisation; None if it has neither."""
    for part in reversed(list(module.modules())):
        # An inserted layer changes no width; a norm with an inserted layer as its child counts as a norm.
        inserted = (isinstance(child, StageLayer) for child in part.children())
        if isinstance(part, StageLayer) or not all(inserted):
            continue
        for attribute in ("out_channels", "num_features", "num_channels"):
            width = getattr(part, attribute, None)
            if isinstance(width, int) and width > 0:
                return width
    return None


def _named(places: list[tuple[str, Side, int]]) -> list[Stage]:
    return [Stage(f"enc{i}", *place) for i, place in enumerate(places, start=1)]


def _chain(inputs: list[str], last: str, widths: list[int]) -> list[Stage]:
    """Return stages whose features are inputs of modules, except for the last, an output."""
    places: list[tuple[str, Side, int]] = [(n, "input", w) for n, w in zip(inputs, widths[:-1], strict=True)]
    return _named([*places, (last, "output", widths[-1])])


def _outputs(names: list[str], widths: list[int]) -> list[Stage]:
    return _named([(name, "output", width) for name, width in zip(names, widths, strict=True)])


def _inside(stages: list[Stage], prefix: str) -> list[Stage]:
    return [replace(stage, module=f"{prefix}.{stage.module}") for stage in stages]


def _basic_unet(net: Any) -> list[Stage]:
    # The output of a `down` block is also a skip connection; that of the pooling in the next block is not.
    widths = [getattr(net, f"down_{i}").convs.conv_0.conv.in_channels for i in (1, 2, 3, 4)]
    bottleneck = net.down_4.convs.conv_1.conv.out_channels
    return _outputs([*(f"down_{i}.max_pooling" for i in (1, 2, 3, 4)), "down_4"], [*widths, bottleneck])


def _unetr(net: Any) -> list[Stage]:
    return _named([("decoder5", "input", net.hidden_size)])


def _mednext(net: Any) -> list[Stage]:
    count = len(net.down_blocks)
    widths = [net.stem.out_channels * 2**i for i in range(count + 1)]
    return _chain([f"down_blocks.{i}" for i in range(count)], "bottleneck", widths)


def _unet(net: Any) -> list[Stage]:
    # `model` nests as down, SkipConnection(rest), up: the input of `rest` is the stage's output.
    skips = [name for name, module in net.named_modules() if isinstance(module, SkipConnection)]
    names = [f"{name}.submodule" for name in skips]
    return _chain(names, names[-1], list(net.channels))


def _dyn_unet(net: Any) -> list[Stage]:
    names = [".".join(["skip_layers"] + ["next_layer"] * depth) for depth in range(1, len(net.filters))]
    return _chain(names, names[-1], list(net.filters))


def _seg_res_net(net: Any) -> list[Stage]:
    count = len(net.down_layers)
    widths = [net.init_filters * 2**i for i in range(count)]
    return _chain([f"down_layers.{i}" for i in range(1, count)], f"down_layers.{count - 1}", widths)


def _seg_res_net_ds(net: Any) -> list[Stage]:
    count = len(net.encoder.layers)
    widths = [net.encoder.init_filters * 2**i for i in range(count)]
    names = [f"encoder.layers.{i}" for i in range(count)]
    return _chain([f"{name}.downsample" for name in names[:-1]], f"{names[-1]}.blocks", widths)


def _resnet(net: Any) -> list[Stage]:
    layers = ["layer1", "layer2", "layer3", "layer4"]
    widths = [net.conv1.out_channels, *(output_channels(getattr(net, name)) or 0 for name in layers)]
    return _chain(layers, "layer4", widths)


def _densenet(net: Any) -> list[Stage]:
    # Transitions hold the pooling after a dense block; the last block has a norm in its place.
    prefixes = ("pool0", "transition", "norm5")
    names = [name for name, _ in net.features.named_children() if name.startswith(prefixes)]
    widths = [output_channels(net.features.get_submodule(name)) or 0 for name in names[1:]]
    return _outputs([f"features.{name}" for name in names], [net.features.conv0.out_channels, *widths])


def _swin_unetr(net: Any) -> list[Stage]:
    # The features before each of the transformer's layers, and after the last, are also the skips.
    first = [f"layers{i}{'c' if net.swinViT.use_v2 else ''}.0" for i in (1, 2, 3, 4)]
    widths = [net.swinViT.embed_dim * 2**i for i in range(5)]
    return _inside(_chain(first, "layers4.0", widths), "swinViT")


def _staged_classifier(net: Any) -> list[Stage]:
    names = [f"encoder.{name}" for name, _ in net.encoder.named_children()]
    return _outputs(names, [output_channels(stage) or 0 for stage in net.encoder])


def _swin_classifier(net: Any) -> list[Stage]:
    return _outputs([f"encoder.layers{i}.0" for i in (1, 2, 3, 4)], list(net.widths))


_STAGES: dict[type[nn.Module], Callable[[Any], list[Stage]]] = {
    nets.BasicUNet: _basic_unet,
    nets.DenseNet: _densenet,
    nets.DynUNet: _dyn_unet,
    nets.MedNeXt: _mednext,
    nets.ResNet: _resnet,
    nets.SegResNet: _seg_res_net,
    nets.SegResNetDS: _seg_res_net_ds,
    StagedClassifier: _staged_classifier,
    SwinClassifier: _swin_classifier,
    nets.SwinUNETR: _swin_unetr,
    nets.UNETR: _unetr,
    nets.UNet: _unet,
}


def known_stages(net: nn.Module) -> list[Stage] | None:
    """Return the encoder stages of a network in order; None for an unknown network."""
    for cls in type(net).__mro__:
        if cls in _STAGES:
            return _STAGES[cls](net)
    return None


def supported_networks() -> tuple[str, ...]:
    """Names of the network classes whose stages are known."""
    return tuple(cls.__name__ for cls in _STAGES)


_HEADS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# DynUNet and MedNeXt register coarser heads after the finest one. The last block of UNet is a transposed
# convolution and, with residual units, a convolution.
_HEAD_NAMES = {nets.DynUNet: "output_block.conv.conv", nets.MedNeXt: "out_0.conv_out", nets.UNet: "model.2"}


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
