"""The methods, networks and data sets that a user can choose, from a file that is made from their classes.

The file, ``catalogue.json``, spares a command that only lists them the import of PyTorch and MONAI. ``make
catalogue`` writes it anew (`medfedaug.cli.describe`). Additions of other packages are listed by their entry
points; one of them is imported when it is asked for by name, and so is a network by its class path.
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
    """List all methods; nothing of another package is imported."""
    return _known("methods", plugins.METHODS)


def describe_method(name: str) -> Described:
    """Describe a method: its arguments, and what leaves a site.

    Raises:
        ConfigError: for a name that is not known, or a package that may not be used or cannot be imported.
    """
    name = match_case(name, [one.name for one in known_methods()])
    found = _find("method", name, known_methods())
    if plugins.find(plugins.METHODS, name, _built_in("methods")):
        from medfedaug.cli import describe  # and with it PyTorch

        return describe.describe_method(name)
    return found


def check_methods(text: str) -> None:
    """Check the names of methods, separated by commas, without an import of any.

    Raises:
        ConfigError: for a name that is not known, or a package that may not be used.
    """
    known = known_methods()
    for part in split_names("methods", text):
        name = match_case(part, [one.name for one in known])
        if plugins.find(plugins.METHODS, name, _built_in("methods")) is None:
            _find("method", name, known)


def known_networks() -> list[Described]:
    """List all networks that have a name; nothing of another package is imported."""
    return _known("networks", plugins.NETWORKS)


def check_network(name: str) -> None:
    """Check that a network has a name here, or is a class path, as `check_methods` does."""
    if "." not in name and plugins.find(plugins.NETWORKS, name, _built_in("networks")) is None:
        _find("network", name, known_networks())


def describe_network(name: str) -> Described:
    """Describe a network: its arguments, and its stages and size in 2D and 3D.

    Raises:
        ConfigError: for a name that is not known, or a package that may not be used or cannot be imported.
    """
    found = None if "." in name else _find("network", name, known_networks())
    # The file is of one version of MONAI; classes and defaults of the installed one may be others.
    other = _content()["monai"] != metadata.version("monai")
    if other or found is None or plugins.find(plugins.NETWORKS, name, _built_in("networks")):
        from medfedaug.cli import describe  # and with it PyTorch

        return describe.describe_network(name)
    return found


def known_data_sets() -> list[Described]:
    """List all published data sets that can be named."""
    return list(_content()["data_sets"].values())


def describe_data_set(name: str) -> Described:
    """Describe a published data set: its address, the layout of its folder, its options and its protocols."""
    return _find("data set", name, known_data_sets())


def _known(kind: str, group: str) -> list[Described]:
    usable = plugins.names(group, _built_in(kind))
    packages = {plugin.name: plugin.package for plugin in plugins.installed(group)}
    return [*_content()[kind].values(), *(Described(name, package=packages[name]) for name in usable)]


def _built_in(kind: str) -> Collection[str]:
    return _content()[kind].keys()


def _find(what: str, name: str, known: Sequence[Described]) -> Described:
    names = [one.name for one in known]
    if name not in names:
        raise ConfigError(f"{what} {name!r} {not_known(name, names)}")
    return known[names.index(name)]


@cache
def _content() -> dict[str, Any]:
    """The version of MONAI that the file is of, and by kind and name the descriptions in their order."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        kind: found if kind == "monai" else {one["name"]: _read(one) for one in found}
        for kind, found in content.items()
    }


def _read(one: dict[str, Any]) -> Described:
    arguments = tuple(Argument(**argument) for argument in one.get("arguments", ()))
    return Described(**{**one, "text": tuple(one.get("text", ())), "arguments": arguments})
