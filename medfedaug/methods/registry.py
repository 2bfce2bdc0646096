"""Methods by name, and checks of their combination."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from medfedaug.errors import ConfigError, config_errors
from medfedaug.methods import catalogue
from medfedaug.methods.base import Method
from medfedaug.methods.compatibility import check_compatible, constraints
from medfedaug.utils import plugins
from medfedaug.utils.plugins import added_modules
from medfedaug.utils.validation import check_keys, match_case, not_known, split_names

_CLASSES = [
    cls
    for module in (catalogue, *added_modules("methods.catalogue"))
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Method)
]
_BUILT_IN = {cls.name: cls for cls in sorted(_CLASSES, key=lambda cls: cls.__module__.rpartition(".")[2])}

COMBINATIONS: dict[str, list[dict[str, Any]]] = {
    "fedrdn_v": [{"name": "fedrdn", "args": {"average": True}}],
    "fedfa+": [{"name": "fedfa"}, {"name": "fedfa_h"}],
}
"""Published names of combinations and of methods with arguments."""

BUILT_IN_NAMES = (*_BUILT_IN, *COMBINATIONS)  # the names that no other package may use


def built_in_methods() -> dict[str, type[Method]]:
    """Return the classes of the built-in methods by name."""
    return dict(_BUILT_IN)


def method_names() -> list[str]:
    """Return the names that `parse_methods` accepts; names from other packages come last."""
    return [*BUILT_IN_NAMES, *plugins.names(plugins.METHODS, BUILT_IN_NAMES)]


def parse_methods(text: str, settings: Mapping[str, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Turn ``"fedrdn,fedfa"`` into the specification in `medfedaug.config.run.RunConfig`.

    Args:
        text: names, separated by commas, in any case.
        settings: arguments by method, ``{"fedfa": {"prob": 0.3}}``.

    Raises:
        ConfigError: for an unknown name, and for settings of a method that is not named.

    >>> parse_methods("fedrdn,fedfa+", {"fedfa_h": {"bins": 16}})
    [{'name': 'fedrdn', 'args': {}}, {'name': 'fedfa', 'args': {}}, {'name': 'fedfa_h', 'args': {'bins': 16}}]
    """
    settings = dict(settings or {})
    chosen = [canonical_name(name) for name in split_names("methods", text)]
    if not chosen:
        raise ConfigError(f"no method was named; choose from {', '.join(method_names())}")
    for name in chosen:
        if name in COMBINATIONS:
            plugins.find(plugins.METHODS, name, BUILT_IN_NAMES)
        else:
            find_class(name)
    specs = [spec for name in chosen for spec in COMBINATIONS.get(name, [{"name": name}])]
    names = [spec["name"] for spec in specs]
    if stray := sorted(settings.keys() - {*names}):
        raise ConfigError(
            f"arguments for {', '.join(stray)}, which is not among the methods {', '.join(names)}"
        )
    return [
        {"name": spec["name"], "args": {**spec.get("args", {}), **settings.get(spec["name"], {})}}
        for spec in specs
    ]


def canonical_name(name: str) -> str:
    """Return a name in the case of its method; an unknown name stays as it is."""
    known = [*BUILT_IN_NAMES, *(plugin.name for plugin in plugins.installed(plugins.METHODS))]
    return match_case(name, known)


def build_methods(specs: Sequence[Mapping[str, Any]]) -> list[Method]:
    """Make the methods of a specification, and check their combination.

    Raises:
        ConfigError: for unknown names or arguments, repeated methods, and methods that exclude each other.
    """
    methods = [_build(spec) for spec in specs]
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:  # the name is also the prefix of a method's keys in messages
            raise ConfigError(f"{name} is named more than once")
    check_compatible([constraints(method) for method in methods])
    return sorted(methods, key=lambda method: "extra_passes" in method.provides)


def _build(spec: Mapping[str, Any]) -> Method:
    name, args = str(spec.get("name")), dict(spec.get("args") or {})
    factory = find_class(name)
    known = [] if factory.__init__ is object.__init__ else list(inspect.signature(factory).parameters)
    check_keys(f"{name} has no argument", args, known)
    with config_errors(name):  # a method of another package may raise anything
        return factory(**args)


def find_class(name: str) -> type[Method]:
    """Return the class of a method, built in or from another package."""
    plugin = plugins.find(plugins.METHODS, name, BUILT_IN_NAMES)
    if plugin is None:
        if name not in _BUILT_IN:
            raise ConfigError(f"method {name!r} {not_known(name, method_names())}")
        return _BUILT_IN[name]
    cls = plugin.load()
    if not isinstance(cls, type) or not issubclass(cls, Method) or cls.name != plugin.name:
        raise ConfigError(f"{plugin.what}: {cls!r} must be a `Method` whose `name` is {plugin.name!r}")
    return cls
