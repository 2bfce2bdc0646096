"""Pre-trained weights for a network: reading a state dict, and finding the entries that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from medfedaug.errors import ConfigError, first_line
from medfedaug.models.tensor_files import load_tensors

# What a training script puts around a state dict.
_WITHIN = ("state_dict", "model_state_dict", "model", "network", "net")
_REMEDY = "Write one with torch.save(net.state_dict(), FILE)."
# Prefixes that wrappers add to names, or that a network gets as the encoder of another one.
_PREFIXES = ("", "module.", "model.", "net.", "network.", "backbone.", "encoder.", "module.encoder.")


@dataclass(frozen=True)
class Fit:
    """The entries of a state dict that fit a network.

    Args:
        entries: the entries that fit, by the network's own names, in float32.
        skipped: the entries that do not fit, by the names in the file, with the reason.
        missing: floating-point entries of the network that the state dict does not give.
        of: how many floating-point entries the network has.
    """

    entries: dict[str, Tensor]
    skipped: dict[str, str]
    missing: list[str]
    of: int


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a state dict in a file.

    Args:
        path: what ``torch.save(net.state_dict(), path)`` or safetensors wrote; a state dict within a
            checkpoint is found by the usual names. Nothing in the file is executed.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content = load_tensors(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except Exception as error:  # a damaged file fails anywhere between zip and pickle
        raise ConfigError(f"{path}: not a state dict ({first_line(error)}). {_REMEDY}") from error
    for name in _WITHIN:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    tensors = _tensors(content)
    if not tensors:
        raise ConfigError(f"{path}: not a state dict (no tensors by name). {_REMEDY}")
    return tensors


def _tensors(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    return {
        str(name): value.detach()
        for name, value in content.items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    }


def fit_weights(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Fit:
    """Find the entries of a network that given weights have.

    An entry fits if its name and its shape do. Names may differ by one of the usual prefixes, such as
    ``module.``, or ``encoder.`` if the network is the encoder of another one; of all changes of the prefix,
    the one is used with which most entries fit. The ResNets of torchvision, timm and MONAI have the same
    names.

    Example:
        >>> given = {"module.weight": torch.ones(2, 3), "module.bias": torch.ones(4)}
        >>> fit = fit_weights(given, torch.nn.Linear(3, 2).state_dict())
        >>> list(fit.entries), fit.skipped, fit.missing
        (['weight'], {'module.bias': 'shape [4], needed [2]'}, ['bias'])
    """
    wanted = {name: value for name, value in state.items() if value.is_floating_point()}
    given = {name: value for name, value in weights.items() if value.is_floating_point()}

    def names(less: str, more: str) -> dict[str, str]:
        return {name: more + name[len(less) :] for name in given if name.startswith(less)}

    def score(renamed: Mapping[str, str]) -> tuple[int, int]:
        there = [name for name, new in renamed.items() if new in wanted]
        return sum(given[name].shape == wanted[renamed[name]].shape for name in there), len(there)

    # The first of several that are as good: that without any change.
    best = max((names(less, more) for less in _PREFIXES for more in _PREFIXES), key=score)
    entries: dict[str, Tensor] = {}
    skipped: dict[str, str] = {}
    for name, value in given.items():
        new = best.get(name, name)
        if new not in wanted:
            skipped[name] = "the network has no such entry"
        elif value.shape != wanted[new].shape:
            skipped[name] = f"shape {list(value.shape)}, needed {list(wanted[new].shape)}"
        else:
            entries[new] = value.to(torch.float32).clone(memory_format=torch.contiguous_format)
    return Fit(entries, skipped, [name for name in wanted if name not in entries], len(wanted))
