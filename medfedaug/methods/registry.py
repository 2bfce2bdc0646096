"""The methods by name, and the checks that several go together."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from medfedaug.errors import ConfigError, first_line
from medfedaug.methods import catalogue
from medfedaug.methods.base import Method
from medfedaug.methods.compatibility import check_compatible, constraints
from medfedaug.utils import plugins
from medfedaug.utils.validation import match_case, not_known, split_names

_BUILT_IN: dict[str, type[Method]] = {
    found.name: found
    for found in vars(catalogue).values()
    if isinstance(found, type) and issubclass(found, Method)
}

COMBINATIONS: dict[str, list[dict[str, Any]]] = {
    "fedrdn_v": [{"name": "fedrdn", "args": {"average": True}}],
    "fedfa+": [{"name": "fedfa"}, {"name": "fedfa_h"}],
    "harmofl": [{"name": "fedharmo"}],
}
"""Published names of a combination, of a method with an argument, or that other papers give to a method."""

BUILT_IN_NAMES = (*_BUILT_IN, *COMBINATIONS)
"""The names that no other package may take."""


def built_in_methods() -> dict[str, type[Method]]:
    """The classes of the methods that are built in, by name."""
    return dict(_BUILT_IN)


def method_names() -> list[str]:
    """The names that `parse_methods` accepts; those that other packages add come last."""
    return [*BUILT_IN_NAMES, *plugins.names(plugins.METHODS, BUILT_IN_NAMES)]


def parse_methods(text: str, settings: Mapping[str, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """``"fedrdn,fedfa"`` as the specification that `medfedaug.config.run.RunConfig` holds.

    Args:
        text: names, separated by commas, in capitals or not.
        settings: arguments by method, ``{"fedfa": {"prob": 0.3}}``.

    Raises:
        ConfigError: for a name that is not known, and for settings of a method that is not asked for.

    >>> parse_methods("fedrdn,fedfa+", {"fedfa_h": {"bins": 16}})
    [{'name': 'fedrdn', 'args': {}}, {'name': 'fedfa', 'args': {}}, {'name': 'fedfa_h', 'args': {'bins': 16}}]
    """
    settings = dict(settings or {})
    given = [canonical_name(name) for name in split_names("methods", text)]
    if not given:
        raise ConfigError(f"no method was named; choose from {', '.join(method_names())}")
    for name in given:
        if name in COMBINATIONS:
            plugins.find(plugins.METHODS, name, BUILT_IN_NAMES)
        else:
            find_class(name)
    specs = [spec for name in given for spec in COMBINATIONS.get(name, [{"name": name}])]
    names = [spec["name"] for spec in specs]
    stray = sorted(set(settings) - set(names))
    if stray:
        raise ConfigError(
            f"arguments for {', '.join(stray)}, which is not among the methods {', '.join(names)}"
        )
    return [
        {"name": spec["name"], "args": {**spec.get("args", {}), **settings.get(spec["name"], {})}}
        for spec in specs
    ]


def canonical_name(name: str) -> str:
    """A name as its method has it, which may be with capitals; an unknown one stays as it is."""
    known = [*BUILT_IN_NAMES, *(plugin.name for plugin in plugins.installed(plugins.METHODS))]
    return match_case(name, known)


def build_methods(specs: Sequence[Mapping[str, Any]]) -> list[Method]:
    """Make the methods of a specification, and check that they go together.

    Raises:
        ConfigError: for unknown names or arguments, a method named twice, and two that exclude each other.
    """
    methods = [_build(spec) for spec in specs]
    names = [method.name for method in methods]
    for name in names:
        # The name is also the prefix of a method's keys on the wire.
        if names.count(name) > 1:
            raise ConfigError(f"{name} is named more than once")
    check_compatible([constraints(method) for method in methods])
    return sorted(methods, key=lambda method: "extra_passes" in method.provides)


def _build(spec: Mapping[str, Any]) -> Method:
    name, args = str(spec.get("name")), dict(spec.get("args") or {})
    factory = find_class(name)
    known = [] if factory.__init__ is object.__init__ else list(inspect.signature(factory).parameters)
    unknown = sorted(set(args) - set(known))
    if unknown:
        near = get_close_matches(unknown[0], known, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"{name} has no argument {', '.join(unknown)}{meant}; it takes {', '.join(known) or 'none'}"
        )
    try:
        return factory(**args)
    except ConfigError:
        raise
    except Exception as error:  # whatever the method of another package does with its arguments
        raise ConfigError(f"{name}: {first_line(error)}") from error


def find_class(name: str) -> type[Method]:
    """The class of a method that is built in, or that another package adds.

    Raises:
        ConfigError: for a name that is not known, and a package that may not or cannot be used.
    """
    plugin = plugins.find(plugins.METHODS, name, BUILT_IN_NAMES)
    if plugin is not None:
        return method_class(plugin)
    if name not in _BUILT_IN:
        raise ConfigError(f"method {name!r} {not_known(name, method_names())}")
    return _BUILT_IN[name]


def method_class(plugin: plugins.Plugin) -> type[Method]:
    """The class that a package adds as a method.

    Raises:
        ConfigError: naming the package, when the class cannot be loaded or is no method of that name.
    """
    found = plugin.load()
    if not isinstance(found, type) or not issubclass(found, Method):
        raise ConfigError(f"{plugin.what}: {found!r} is no subclass of medfedaug.methods.Method")
    if getattr(found, "name", None) != plugin.name:
        raise ConfigError(f"{plugin.what}: the class {found.__name__} must have that name as its `name`")
    return found
