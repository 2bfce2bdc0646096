"""Find what `medfedaug.hospital` and `medfedaug.research` add to the core, which imports neither."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from medfedaug.errors import ConfigError

_LAYERS = ("medfedaug.hospital", "medfedaug.research")


def added_modules(name: str) -> list[ModuleType]:
    """Import the module of this name, such as ``methods.catalogue``, of each installed layer that has it."""
    return [import_module(f"{layer}.{name}") for layer in _LAYERS if _exists(f"{layer}.{name}")]


def added_module(name: str, feature: str) -> ModuleType:
    """Import the module of this name of the layer that has it, for a feature that a user asked for."""
    modules = added_modules(name)
    if not modules:
        raise ConfigError(f"{feature} needs {' or '.join(_LAYERS)}, which this installation lacks")
    return modules[0]


def _exists(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (parent == "medfedaug" or _exists(parent)) and find_spec(module) is not None
