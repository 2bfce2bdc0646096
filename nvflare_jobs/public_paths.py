"""The paths by which jobs and kits name classes of this package, independent of the folders of their files.

A job names ``medfedaug.nvflare_jobs.executor.SiteExecutor``, and a kit's list of classes allows this path
alone. Job, kit and package may have different versions, so the paths are a format, and outlive a move.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import TypeVar

_PACKAGE = __name__.rpartition(".")[0]
_ROOMS = {
    "job": ("controller", "evaluation", "executor", "loop", "tracking", "wandb_receiver"),
    "kit": ("app_validator", "kit_status", "launcher", "lost_jobs", "rejoin", "startup"),
}
_FILES = {f"{_PACKAGE}.{name}": f"{_PACKAGE}.{room}.{name}" for room in _ROOMS for name in _ROOMS[room]}

Class = TypeVar("Class", bound=type)


def public_path(cls: Class) -> Class:
    """Give a class the path by which jobs and kits name it, without the folder of its file."""
    module, public = cls.__module__, {file: path for path, file in _FILES.items()}
    cls.__module__ = public[module]
    sys.modules[public[module]] = sys.modules[module]
    return cls


def find_public_paths() -> None:
    """Let Python import each public path as its file."""
    if not any(isinstance(finder, _PublicPaths) for finder in sys.meta_path):
        sys.meta_path.append(_PublicPaths())


class _PublicPaths(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name in _FILES else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(_FILES[module.__name__])
