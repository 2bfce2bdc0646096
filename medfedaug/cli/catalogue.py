"""The methods, networks and data sets that a user can choose, from a file of their descriptions.

The file, ``catalogue.json``, spares commands that only list them the import of PyTorch and MONAI. ``make
catalogue`` writes it (`medfedaug.cli.describe`). Additions of other packages are listed by their entry
points, and imported when a user names one; so are networks by their class path.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from medfedaug.cli.described import FILE, Argument, Described
from medfedaug.errors import ConfigError
from medfedaug.utils import plugins
from medfedaug.utils.validation import match_case, not_known, split_names


def known_methods() -> list[Described]:
    """List all methods, without importing other packages."""
    return _known("methods", plugins.METHODS)


def describe_method(name: str) -> Described:
    """Describe a method: its arguments, and the data that leave a site.

    Raises:
        ConfigError: for a name that is not known, or a package that may not be used or cannot be imported.
    """
    name = match_case(name, [entry.name for entry in known_methods()])
    described = _find("method", name, known_methods())
    if plugins.find(plugins.METHODS, name, _built_in("methods")):
        from medfedaug.cli import describe  # imports PyTorch

        return describe.describe_method(name)
    return described


def check_methods(text: str) -> None:
    """Check the names of methods, separated by commas, without importing any.

    Raises:
        ConfigError: for a name that is not known, or a package that may not be used.
    """
    known = known_methods()
    for part in split_names("methods", text):
        name = match_case(part, [entry.name for entry in known])
        if plugins.find(plugins.METHODS, name, _built_in("methods")) is None:
            _find("method", name, known)


def known_networks() -> list[Described]:
    """List all networks that have a name, without importing other packages."""
    return _known("networks", plugins.NETWORKS)


def check_network(name: str) -> None:
    """Check that a network is a known name or a class path, as `check_methods`."""
    if "." not in name and plugins.find(plugins.NETWORKS, name, _built_in("networks")) is None:
        _find("network", name, known_networks())


def describe_network(name: str) -> Described:
    """Describe a network: its arguments, and its stages and size in 2D and 3D."""
    described = None if "." in name else _find("network", name, known_networks())
    # The file describes one version of MONAI; the installed one may have other classes and defaults.
    other = _content()["monai"] != metadata.version("monai")
    if other or described is None or plugins.find(plugins.NETWORKS, name, _built_in("networks")):
        from medfedaug.cli import describe  # imports PyTorch

        return describe.describe_network(name)
    return described


def known_data_sets() -> list[Described]:
    """List all published data sets that have a name."""
    return list(_content()["data_sets"].values())


def describe_data_set(name: str) -> Described:
    """Describe a published data set: address, layout of its folder, options, and protocols."""
    return _find("data set", name, known_data_sets())


def _known(kind: str, group: str) -> list[Described]:
    usable = plugins.names(group, _built_in(kind))
    packages = {plugin.name: plugin.package for plugin in plugins.installed(group)}
    return [*_content()[kind].values(), *(Described(name, package=packages[name]) for name in usable)]


def _built_in(kind: str) -> Collection[str]:
    return _content()[kind].keys()


def _find(kind: str, name: str, known: Sequence[Described]) -> Described:
    by_name = {entry.name: entry for entry in known}
    if name not in by_name:
        raise ConfigError(f"{kind} {name!r} {not_known(name, [*by_name])}")
    return by_name[name]


@cache
def _content() -> dict[str, Any]:
    """Read MONAI's version of the file, and the descriptions by kind and name."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        kind: value if kind == "monai" else {entry["name"]: _read(entry) for entry in value}
        for kind, value in content.items()
    }


def _read(entry: dict[str, Any]) -> Described:
    arguments = tuple(Argument(**argument) for argument in entry.get("arguments", ()))
    return Described(**{**entry, "text": tuple(entry.get("text", ())), "arguments": arguments})
