"""Files of tensors, and pre-trained weights: the entries of a state dict that fit a network."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from medfedaug.errors import ConfigError, first_line

# Keys under which training scripts save a state dict.
_WITHIN = ("state_dict", "model_state_dict", "model", "network", "net")
_REMEDY = "Write one with torch.save(net.state_dict(), FILE)."
# Prefixes that wrappers add to names, or that the encoder of another network has.
_PREFIXES = ("", "module.", "model.", "net.", "network.", "backbone.", "encoder.", "module.encoder.")


@dataclass(frozen=True)
class Fit:
    """The entries of a state dict that fit a network.

    Args:
        entries: the entries that fit, by the network's own names, in float32.
        skipped: the entries that do not fit, by the names in the file, with the reason.
        missing: floating-point entries of the network that the state dict does not give.
        total: number of floating-point entries of the network.
    """

    entries: dict[str, Tensor]
    skipped: dict[str, str]
    missing: list[str]
    total: int


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict in a file, without executing anything in it.

    The file is of ``torch.save(net.state_dict(), path)`` or safetensors; a checkpoint may have the state dict
    under one of the usual keys.
    """
    path = Path(path)
    try:
        content = safetensors.torch.load_file(path) if path.suffix == ".safetensors" else load_tensors(path)
        for name in _WITHIN:
            content = content[name] if isinstance(content.get(name), Mapping) else content
        tensors = {str(name): value.detach() for name, value in content.items() if _is_dense(value)}
        if not tensors:
            raise ValueError("no tensors by name")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except Exception as error:  # a damaged file fails anywhere between zip and pickle
        raise ConfigError(f"{path}: not a state dict ({first_line(error)}). {_REMEDY}") from error
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


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


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
