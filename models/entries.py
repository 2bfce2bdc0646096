"""Entries of a network: their names, passes with others, frozen ones, and files of weights that fit them."""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug.errors import ConfigError, config_errors

# Keys under which training scripts save a state dict.
_WITHIN = ("state_dict", "model_state_dict", "model", "network", "net")
_REMEDY = "Write one with torch.save(net.state_dict(), FILE)."
# Prefixes that wrappers add to names, or that the encoder of another network has.
_PREFIXES = ("", "module.", "model.", "net.", "network.", "backbone.", "encoder.", "module.encoder.")


def call_with(net: nn.Module, weights: Mapping[str, Tensor], *inputs: Any) -> Any:
    """Call a network with other parameters and buffers, without changing its own.

    If a module has two names in a network, as in MONAI's DynUNet, `torch.func.functional_call` refuses
    weights under both, and leaves weights under one of them in the network.
    """
    values: dict[tuple[int, str], tuple[str, Tensor]] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module._buffers):
            key = f"{path}.{name}" if path else name
            if key in weights:
                values.setdefault((id(module), name), (key, weights[key]))
    return functional_call(net, dict(values.values()), inputs, tie_weights=False)


def first_names(net: nn.Module) -> dict[str, str]:
    """Map each entry of a network's state dict to the first name of its tensor.

    The entries of a module that is registered twice, as in MONAI's DynUNet, have two names. They are sent,
    kept and frozen under the first. A state dict is loaded in order, so that a value under the second name
    would overwrite the first.
    """
    return first_names_of(net.state_dict(keep_vars=True))


def first_names_of(entries: Mapping[str, Tensor]) -> dict[str, str]:
    """Map entries of a state dict that keeps its variables to first names (`first_names`)."""
    first: dict[int, str] = {}
    return {key: first.setdefault(id(value), key) for key, value in entries.items()}


def shared_by_name(net: nn.Module, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return entries of a state dict in which all names of one tensor of the network have the first's."""
    names = first_names(net)
    return {key: entries[names[key]] for key in entries}


def state_entries(network: nn.Module, types: tuple[type[nn.Module], ...]) -> frozenset[str]:
    """Return the state-dict keys of modules of some types.

    A word in the key does not tell the type: ``"bn" in key`` misses ``downsample.1.weight``.
    """
    owned: set[str] = set()
    for prefix, module in network.named_modules():
        if isinstance(module, types):
            owned.update(f"{prefix}.{key}" if prefix else key for key in module.state_dict())
    return frozenset(owned)


def trained_entries(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a network that are entries of its state dict, by name."""
    entries = net.state_dict().keys()
    return {name: p for name, p in net.named_parameters() if p.requires_grad and name in entries}


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode for a block, and restore the mode of each module on exit.

    `nn.Module.train` would change modules that are in evaluation mode within a network in training.
    """
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def freeze(net: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Exclude entries of a network's state dict from training, by patterns of their names.

    Parameters that match get no gradient. For batch norms whose running statistics match, call `hold_norms`.

    Patterns are such as ``"encoder.*"``; a star stands for any text, dots included. The result is the entries
    that match, and other names of the same tensors.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        >>> sorted(freeze(net, ["0.*"])), net[0].weight.requires_grad
        (['0.bias', '0.weight'], False)
    """
    if not patterns:
        return frozenset()
    entries, frozen = net.state_dict(keep_vars=True), set()
    for pattern in patterns:
        matches = {id(value) for name, value in entries.items() if fnmatchcase(name, pattern)}
        if not matches:
            names = list(entries)
            examples = ", ".join([*names[:2], "...", *names[-2:]])
            raise ValueError(f"freeze: no entry matches {pattern!r}; entries are for instance {examples}")
        frozen |= matches
    for parameter in net.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in net.parameters()):
        raise ValueError("freeze: no parameter is left to be trained")
    return frozenset(name for name, value in entries.items() if id(value) in frozen)


def hold_norms(net: nn.Module, frozen: frozenset[str]) -> None:
    """Let batch norms with frozen running statistics use these in training, without updating them.

    ``frozen`` are the entries that `freeze` returned. The next call of `net.train()` undoes it.
    """
    for path, module in net.named_modules():
        if isinstance(module, _BatchNorm) and f"{path}.running_mean".lstrip(".") in frozen:
            module.eval()


@dataclass(frozen=True)
class Fit:
    """The entries of a state dict that fit a network."""

    entries: dict[str, Tensor]  # the entries that fit, by the network's own names, in float32
    skipped: dict[str, str]  # the entries that do not fit, by the names in the file, with the reason
    missing: list[str]  # floating-point entries of the network that the state dict does not give
    total: int  # number of floating-point entries of the network


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict in a file, without executing anything in it.

    The file is of ``torch.save(net.state_dict(), path)`` or safetensors; a checkpoint may have the state dict
    under one of the usual keys.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    # A damaged file fails anywhere between zip and pickle.
    with config_errors(f"{path}: not a state dict", Exception, remedy=f". {_REMEDY}"):
        content = safetensors.torch.load_file(path) if path.suffix == ".safetensors" else load_tensors(path)
        for name in _WITHIN:
            content = content[name] if isinstance(content.get(name), Mapping) else content
        dense = {n: v for n, v in content.items() if isinstance(v, Tensor) and v.layout == torch.strided}
        tensors = {str(name): value.detach() for name, value in dense.items()}
        if not tensors:
            raise ValueError("no tensors by name")
    return tensors


def load_tensors(path: Path) -> Any:
    """Load a file of `torch.save` on the CPU.

    PyTorch does not verify the checksums of a file's parts: a flipped bit would change a weight.

    Raises:
        OSError: when the file cannot be read.
        ValueError: when a part differs from its checksum.
        Exception: of any kind, for a damaged file.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"damaged: {damaged} differs from its checksum")
    return torch.load(path, map_location="cpu", weights_only=True)


def fit_weights(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Fit:
    """Find the weights that fit the entries of a network, by name and shape.

    Names may differ by one of the usual prefixes, such as ``module.``, or ``encoder.`` if the network is the
    encoder of another one; the change of prefix with most fitting entries counts. The ResNets of torchvision,
    timm and MONAI have the same names.

    Example:
        >>> weights = {"module.weight": torch.ones(2, 3), "module.bias": torch.ones(4)}
        >>> fit = fit_weights(weights, torch.nn.Linear(3, 2).state_dict())
        >>> list(fit.entries), fit.skipped, fit.missing
        (['weight'], {'module.bias': 'shape [4], needed [2]'}, ['bias'])
    """
    wanted = {name: value for name, value in state.items() if value.is_floating_point()}
    offered = {name: value for name, value in weights.items() if value.is_floating_point()}

    def names(less: str, more: str) -> dict[str, str]:
        return {name: more + name[len(less) :] for name in offered if name.startswith(less)}

    def score(renamed: Mapping[str, str]) -> tuple[int, int]:
        matches = [name for name, new in renamed.items() if new in wanted]
        return sum(offered[name].shape == wanted[renamed[name]].shape for name in matches), len(matches)

    # Of equal scores the first counts; the first pair changes nothing.
    best = max((names(less, more) for less in _PREFIXES for more in _PREFIXES), key=score)
    entries: dict[str, Tensor] = {}
    skipped: dict[str, str] = {}
    for name, value in offered.items():
        new = best.get(name, name)
        if new not in wanted:
            skipped[name] = "the network has no such entry"
        elif value.shape != wanted[new].shape:
            skipped[name] = f"shape {list(value.shape)}, needed {list(wanted[new].shape)}"
        else:
            entries[new] = value.to(torch.float32).clone(memory_format=torch.contiguous_format)
    return Fit(entries, skipped, [name for name in wanted if name not in entries], len(wanted))
