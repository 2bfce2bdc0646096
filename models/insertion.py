"""Insert layers after the encoder stages of a network, and remove them.

The layers act through hooks: the code, modules, names and state dict of the network stay the same. Each layer
is a child of a module of the network, so that `net.to()`, `net.train()` and `copy.deepcopy(net)` include it.
A hook holds the path from its module to the layer and no reference to either, so that a copied or unpickled
network uses its own layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch import nn

from medfedaug.models.ffa import FFALayer
from medfedaug.models.stages import (
    PickledHook,
    Stage,
    StageLayer,
    known_stages,
    output_channels,
    supported_networks,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Network = TypeVar("Network", bound=nn.Module)
Layer = TypeVar("Layer", bound=StageLayer)

# Containers whose `forward` may call all their children, and would call an extra one.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Hook(PickledHook):
    """Passes features through the layer at `path`, of type `kind`, on behalf of a stage."""

    def __init__(self, kind: type[StageLayer], path: str, stage: str) -> None:
        self.kind, self.path, self.stage = kind, path, stage


class _AugmentOutput(_Hook):
    """Forward hook on a module's output."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return module.get_submodule(self.path)(output)


class _AugmentInput(_Hook):
    """Forward pre-hook on a module's first argument."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (module.get_submodule(self.path)(args[0]), *args[1:])


class FFAArguments(TypedDict, total=False):
    """Arguments of `FFALayer` other than the number of channels, for type checkers."""

    prob: float
    momentum: float
    eps: float
    variance: str
    running: str
    bias_correction: bool


def insert_ffa(
    net: Network, stages: Sequence[int | str] | None = None, **ffa: Unpack[FFAArguments]
) -> Network:
    """Insert an `FFALayer` after each stage of a network's encoder.

    The stages of the networks of `medfedaug.models.build_network` and of the MONAI networks in
    `medfedaug.models.stages` are known and named "enc1", "enc2", ...: after the stage's pooling if it has
    one, without a change of skip connections. For any other network, name the modules after which to augment.

    In training without a federation no server sends γ, and the layers augment only by the variance within a
    batch, as FedFA-C does. `medfedaug.runs.finished_run.FinishedRun.gamma` has the γ of a finished run; set
    them with `FFALayer.set_gamma`.

    Insert first, then wrap and compile: `torch.compile(insert_ffa(net))`, or `DataParallel(insert_ffa(net))`.
    MONAI's loaders make MetaTensors; a compiled network needs them without metadata:
    `batch["image"].as_tensor()`. TorchScript cannot compile hooks: call `remove_ffa` before
    `torch.jit.script`.

    Args:
        net: the network, 2D or 3D, changed in place and returned.
        stages: None for all known stages; or some of them, by 1-based number or by name; or dotted names of
            modules, to augment their output (with the number of channels of the last convolution or
            normalisation inside).
        **ffa: arguments of `FFALayer` other than the number of channels.

    Raises:
        ValueError: when the network already has inserted layers, is compiled or scripted, its stages are
            unknown (names modules to choose from), a stage is unknown (lists the known ones), or a number of
            channels is unknown; at the first forward pass in training, when features do not have the
            expected number of channels.

    Deviations:
        The papers place the layers by hand in two networks and say "after each convolutional stage". The
        position after the pooling is from the paper's public code.

    Example:
        >>> from monai.networks.nets import UNet
        >>> net = UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2))
        >>> list(ffa_layers(insert_ffa(net, prob=0.5)))
        ['enc1', 'enc2', 'enc3']
        >>> list(ffa_layers(insert_ffa(remove_ffa(net), stages=[1, "enc3"])))
        ['enc1', 'enc3']
    """
    return insert_layers(net, FFALayer, stages, **ffa)


def insert_layers(
    net: Network, kind: type[StageLayer], stages: Sequence[int | str] | None = None, **args: Any
) -> Network:
    """Insert a layer after each stage of a network's encoder; a stage may have several kinds of layers.

    Args:
        net: the network, 2D or 3D, changed in place, and returned.
        kind: the layer.
        stages: as for `insert_ffa`, with the same errors.
        **args: arguments of the layer other than the number of channels.
    """
    if any(_is_inserted(layer, kind) for layer in net.modules()):
        raise ValueError(f"the network already has {kind.kind} layers: remove them first")
    _check_changeable(net, kind)
    chosen = choose_stages(net, stages)
    reference = next(net.parameters(), None)
    layers = [kind(stage.channels, **args) for stage in chosen]
    targets = [net.get_submodule(stage.module) for stage in chosen]
    hosts = [_host_path(target, stage.side) for target, stage in zip(targets, chosen, strict=True)]
    # Nothing fails from here on, so that no network is left half-way.
    for index, (stage, layer, target, host) in enumerate(zip(chosen, layers, targets, hosts, strict=True), 1):
        layer.stage, layer.stage_index = stage.name, index
        layer.train(target.training)
        if reference is not None:
            layer.to(reference.device)
        child = f"{kind.slug}_{stage.side}"
        target.get_submodule(host).add_module(child, layer)
        path = f"{host}.{child}" if host else child
        if stage.side == "output":
            after = _AugmentOutput(kind, path, stage.name)
            after.handle = target.register_forward_hook(after)
        else:
            before = _AugmentInput(kind, path, stage.name)
            before.handle = target.register_forward_pre_hook(before)
    return net


def remove_ffa(net: Network) -> Network:
    """Remove all layers that `insert_ffa` inserted, in place, and return the network.

    It has the modules, hooks and state dict that it had before.

    Example:
        >>> from monai.networks.nets import UNet
        >>> net = insert_ffa(UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2)))
        >>> ffa_layers(remove_ffa(net))
        {}
    """
    return remove_layers(net, FFALayer)


def remove_layers(net: Network, kind: type[StageLayer] = StageLayer) -> Network:
    """Remove all inserted layers of a kind, by default of every kind, from a network in place."""
    for module in list(net.modules()):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, _Hook) and issubclass(hook.kind, kind):
                    del hooks[key]
        for name in [n for n, child in module.named_children() if _is_inserted(child, kind)]:
            delattr(module, name)
    return net


def ffa_layers(net: nn.Module) -> dict[str, FFALayer]:
    """Return the FFA layers of a network by name of their stage, in the order of the stages.

    Layers of the network's own code follow, by the dotted name of the module.
    """
    return stage_layers(net, FFALayer)


def stage_layers(net: nn.Module, kind: type[Layer]) -> dict[str, Layer]:
    """Return the layers of a kind, as `ffa_layers` does for FFA."""
    named = [(name, m) for name, m in net.named_modules() if isinstance(m, kind)]
    inserted = sorted((m for _, m in named if _is_inserted(m, kind)), key=lambda layer: layer.stage_index)
    layers = {layer.stage: layer for layer in inserted}
    layers.update({name: m for name, m in named if not _is_inserted(m, kind)})
    return layers


def _check_changeable(net: nn.Module, kind: type[StageLayer]) -> None:
    """Refuse compiled networks, whose code would ignore the layers."""
    for module in net.modules():
        # Marks of `torch.compile(net)` and of `net.compile()`.
        compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{type(net).__name__} is compiled and would ignore {kind.kind} layers: insert them first, "
                "then compile: torch.compile(insert_ffa(net))"
            )


def _is_inserted(module: nn.Module, kind: type[StageLayer]) -> bool:
    return isinstance(module, kind) and module.stage_index > 0


def _host_path(target: nn.Module, side: str) -> str:
    """Return the path from `target` to a module whose `forward` would not call an extra child."""
    path: list[str] = []
    host = target
    while isinstance(host, _CONTAINERS):
        name, host = list(host.named_children())[-1 if side == "output" else 0]
        path.append(name)
    return ".".join(path)


def choose_stages(net: nn.Module, stages: Sequence[int | str] | None) -> list[Stage]:
    """Return stages of a network by number, counted from 1, name or name of a module; by default all."""
    known = known_stages(net)
    if stages is None:
        if known is None:
            raise ValueError(
                f"the stages of {type(net).__name__} are not known (known networks: "
                f"{', '.join(supported_networks())}); name modules with stages=[...], on the command "
                f"line --set 'METHOD.stages=[...]', for example: {_candidates(net)}"
            )
        return known
    choices: dict[int | str, Stage] = {stage.name: stage for stage in known or []}
    choices.update(enumerate(known or [], start=1))
    modules = dict(net.named_modules())
    chosen: list[Stage] = []
    for entry in stages:
        width = output_channels(modules[entry]) if entry and entry in modules else None
        if entry in choices:
            chosen.append(choices[entry])
        elif width is not None:
            chosen.append(Stage(str(entry), str(entry), "output", width))
        else:
            raise ValueError(
                f"stage {entry!r} of {type(net).__name__} is unknown, or its number of channels is; choose "
                f"from {', '.join([*map(str, choices), 'modules such as'])} {_candidates(net)}"
            )
    names = [stage.name for stage in chosen]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"stages must be different, and at least one: {names}")
    return chosen


def _candidates(net: nn.Module) -> str:
    names = [n for n, m in net.named_modules() if n and n.count(".") < 2 and output_channels(m) is not None]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
