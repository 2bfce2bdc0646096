"""Classes of MONAI by their paths, and what their constructors take.

A path comes from a job: nothing is imported for it, and only public classes of one namespace are found.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import nn

_FILES = {"pretrained", "url", "path", "dir", "file", "filename", "weights", "checkpoint", "ckpt"}
_HARMLESS = {"use_checkpoint", "drop_path_rate", "dropout_path_rate"}  # memory, and stochastic depth


def public_class(namespace: ModuleType, path: str, what: str) -> type[nn.Module]:
    """The class of a path such as ``monai.networks.nets.SegResNet``.

    Args:
        namespace: the module that the path must lead to.
        path: the whole path.
        what: what is looked for, such as ``network``.
    """
    home = namespace.__name__
    module, _, name = path.rpartition(".")
    if module != home:
        raise ValueError(f"a class path must be one of {home}")
    found = None if name.startswith("_") else vars(namespace).get(name)
    if not (
        inspect.isclass(found) and issubclass(found, nn.Module) and found.__module__.startswith(f"{home}.")
    ):
        raise ValueError(f"{home} has no {what} of the name {name}")
    return found


@lru_cache(maxsize=256)  # a loss is built whenever a site or a server puts its task together
def constructor_parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a constructor, and those that it passes on to its base classes."""
    if not inspect.isclass(cls):
        return _named(cls)
    found: dict[str, inspect.Parameter] = {}
    for init in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
        named = _named(init)
        # What a base class needs, its subclass gives it.
        more = (
            {name: parameter.replace(default=None) for name, parameter in named.items()} if found else named
        )
        found = {**more, **found}
        own = inspect.signature(init).parameters.values()
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in own):
            break
    found.pop("self", None)
    return found


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
