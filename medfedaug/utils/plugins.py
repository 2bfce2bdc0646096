"""Find optional layers of this package, and the plugins of installed packages.

Plugins are methods, networks and training loops. The ``pyproject.toml`` of a package lists them under the
names that a user writes::

    [project.entry-points."medfedaug.methods"]
    cautious = "lesion_methods:Cautious"

A package is imported when one of its names is used. On a user's own machine all installed packages may be
used. A job at a site, or at the server of a federation, uses only the packages that the kit there allows
(`medfedaug.hospital.privacy.site_settings.SiteSettings.plugins`).
"""

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from packaging.utils import canonicalize_name

from medfedaug.errors import ConfigError, first_line, translated

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


def import_extra(module: str, extra: str, feature: str) -> ModuleType:
    """Import a module of a package that an extra installs, for a feature that a user asked for."""
    lacking = ConfigError(f"{feature} needs {module.partition('.')[0]}: pip install 'medfedaug[{extra}]'")
    with translated(ImportError, to=lambda error: lacking):
        return import_module(module)


def _exists(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (parent == "medfedaug" or _exists(parent)) and find_spec(module) is not None


METHODS, NETWORKS = "medfedaug.methods", "medfedaug.networks"
LOOPS = "medfedaug.loops"
"""The groups of entry points."""

_KINDS = {METHODS: "method", NETWORKS: "network", LOOPS: "training loop"}

JOB_GROUPS = (METHODS, NETWORKS, LOOPS)
"""The groups of names in jobs."""

_allowed: frozenset[str] | None = None  # names of packages; ``None`` for all


@dataclass(frozen=True)
class Plugin:
    """Name that a package adds."""

    group: str
    name: str
    package: str
    entry: metadata.EntryPoint

    @property
    def what(self) -> str:
        """Describe the plugin, as ``method 'cautious' of the package lesion-methods``."""
        return f"{_KINDS[self.group]} {self.name!r} of the package {self.package}"

    def load(self) -> Any:
        """Import the package and return the object.

        Raises:
            ConfigError: naming the package, when it cannot be imported or has no such object.
        """

        def named(error: BaseException) -> ConfigError:
            return ConfigError(f"{self.what} cannot be loaded ({type(error).__name__}: {first_line(error)})")

        with translated(Exception, SystemExit, to=named):  # an import may raise anything
            return self.entry.load()


def restrict(packages: Iterable[str] | None) -> None:
    """Restrict this process to the named packages; ``None`` allows all that are installed."""
    global _allowed
    _allowed = None if packages is None else frozenset(map(canonicalize_name, packages))


def installed(group: str) -> list[Plugin]:
    """List all names that the installed packages add, allowed or not; nothing is imported."""
    return list(_installed(group, tuple(sys.path)))


def names(group: str, built_in: Collection[str]) -> list[str]:
    """List the added names that this process may use; nothing is imported."""
    return sorted({plugin.name for plugin in installed(group) if _may(plugin)} - set(built_in))


def find(group: str, name: str, built_in: Collection[str]) -> Plugin | None:
    """Return the plugin of a name; ``None`` if the name is built in or no package adds it.

    Args:
        built_in: the names of medfedaug itself, which no package may take.

    Raises:
        ConfigError: in one line that names the package, when it may not be used here, takes a name that is
            built in, or is one of several with that name.
    """
    plugins = [plugin for plugin in installed(group) if plugin.name == name]
    usable = [plugin for plugin in plugins if _may(plugin)]
    if name in built_in:
        return None
    if len(usable) > 1:
        packages = " and ".join(plugin.package for plugin in usable)
        raise ConfigError(f"{_KINDS[group]} {name!r} is added by {packages}; uninstall one package")
    if plugins and not usable:
        raise ConfigError(
            f"{plugins[0].what} is not allowed here; the site's administrator allows it with: "
            f"medfedaug site configure KIT --allow-plugin {plugins[0].package}"
        )
    return usable[0] if usable else None


def _may(plugin: Plugin) -> bool:
    return _allowed is None or canonicalize_name(plugin.package) in _allowed


@lru_cache(maxsize=16)
def _installed(group: str, path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Cached by search path, since reading the metadata of all packages takes a while."""
    plugins: dict[tuple[str, str, str], Plugin] = {}
    for entry in metadata.entry_points(group=group):
        package = entry.dist.name if entry.dist else entry.value
        plugins.setdefault((package, entry.name, entry.value), Plugin(group, entry.name, package, entry))
    return tuple(sorted(plugins.values(), key=lambda plugin: (plugin.name, plugin.package)))
