"""The engines by name."""

from collections.abc import Callable
from importlib import import_module

import torch

from medfedaug.errors import ConfigError, first_line
from medfedaug.federation.engine import Engine
from medfedaug.federation.in_process import InProcessEngine
from medfedaug.utils.layers import added_module
from medfedaug.utils.validation import not_known


def _nvflare() -> Engine:
    # By its name: the other engines work without NVFlare, and its import takes seconds.
    added_module("privacy", "the engine nvflare")  # its sites have a guard
    engine: Engine = import_module("medfedaug.nvflare_jobs.simulator.simulator").NVFlareEngine()
    return engine


_ENGINES: dict[str, Callable[[], Engine]] = {"nvflare": _nvflare, "inprocess": InProcessEngine}


def find_engine(name: str) -> Engine:
    """Return the engine of a name."""
    if name not in _ENGINES:
        raise ConfigError(f"engine {name!r} {not_known(name, [*_ENGINES])}")
    return _ENGINES[name]()


def check_device(device: str) -> None:
    """Check that a device can be used."""
    if device == "auto":
        return
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("it computes nothing")
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without CUDA
        raise ConfigError(f"device {device} cannot be used: {first_line(error)}") from error
