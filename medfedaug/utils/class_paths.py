"""Classes of MONAI by their paths, and the parameters of their constructors.

A path comes from a job: it imports nothing, and reaches only public classes of one namespace.
"""

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

_FILES = {"pretrained", "url", "path", "dir", "file", "filename", "weights", "checkpoint", "ckpt"}
_HARMLESS = {"use_checkpoint", "drop_path_rate", "dropout_path_rate"}  # memory, and stochastic depth


def public_class(namespace: ModuleType, path: str, what: str) -> type[nn.Module]:
    """Return the class of a path such as ``monai.networks.nets.SegResNet``."""
    home = namespace.__name__
    module, _, name = path.rpartition(".")
    cls = None if module != home or name.startswith("_") else vars(namespace).get(name)
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__.startswith(f"{home}.")):
        raise ValueError(f"{home} has no {what} of the name {path.removeprefix(f'{home}.')}")
    return cls


def constructor_parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a constructor, and those that it passes on to its base classes."""
    if not inspect.isclass(cls):
        return _named(cls)
    parameters: dict[str, inspect.Parameter] = {}
    for init in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
        named = _named(init)
        if parameters:  # a subclass provides what its base class needs
            named = {name: parameter.replace(default=None) for name, parameter in named.items()}
        parameters = {**named, **parameters}
        kinds = {parameter.kind for parameter in inspect.signature(init).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    parameters.pop("self", None)
    return parameters


def _named(function: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def check_arguments(args: Mapping[str, Any]) -> None:
    """Check that no argument names a file or a download."""
    for name in args:
        if name not in _HARMLESS and _FILES.intersection(name.lower().split("_")):
            raise ValueError(f"{name}: weights are neither read from a file nor downloaded here")
