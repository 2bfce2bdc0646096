"""The methods and networks that a user can choose, described from their source files.

Texts are docstrings; arguments and defaults are those of constructors. Nothing is imported: PyTorch and MONAI
take seconds, and a package that adds a method is read like this one (`medfedaug.cli.source`).
"""

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from medfedaug.cli.source import Definition, Parameter, Source, find_definition, read_source
from medfedaug.errors import ConfigError
from medfedaug.utils import plugins
from medfedaug.utils.validation import match_case, not_known, split_names

BESIDE_THE_MODEL, ONLY_FOR = "sent beside the model", "only for"
"""Headings of the facts of a method."""

_METHOD = "medfedaug.methods.base.Method"
# Arguments of a network that follow from the data, or are never used.
_SETTLED = ("spatial_dims", "in_channels", "n_input_channels", "out_channels", "num_classes", "pretrained")


@dataclass(frozen=True)
class Described:
    """Description of a choice: a method, a network or a data set.

    Args:
        name: the name that a user writes.
        what: its description in one line.
        listed: short facts by heading, for the list of all.
        facts: facts by heading.
        text: further paragraphs.
        arguments: its arguments.
        package: the package that adds it; empty for built-in choices.
    """

    name: str
    what: str = ""
    listed: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    text: tuple[str, ...] = ()
    arguments: tuple[Parameter, ...] = ()
    package: str = ""


def known_methods() -> list[Described]:
    """List all methods."""
    built_in = [_listed(name, found) for name, found in _methods().items()]
    return [*built_in, *map(_combination, _combinations()), *_added(plugins.METHODS, _method_names())]


def describe_method(name: str) -> Described:
    """Describe a method: its arguments, and the data that leave a site."""
    name = match_case(name, [*_method_names(), *plugins.names(plugins.METHODS, _method_names())])
    plugin = plugins.find(plugins.METHODS, name, _method_names())
    if plugin is not None:
        found = _of_plugin(plugin)
        return _method(name, found, plugin.package) if found else Described(name, package=plugin.package)
    if name in _combinations():
        return _combination(name)
    check_name("method", name, known_methods())
    return _method(name, _methods()[name])


def check_methods(text: str, arguments: Iterable[str] = ()) -> None:
    """Check the names of methods, separated by commas, without importing any."""
    named: list[str] = []
    known = [*_method_names(), *plugins.names(plugins.METHODS, _method_names())]
    for part in split_names("methods", text):
        name = match_case(part, known)
        if plugins.find(plugins.METHODS, name, _method_names()) is None:
            check_name("method", name, known)
        named += [part["name"] for part in _combinations().get(name, [{"name": name}])]
    if named and (stray := sorted({*arguments} - {*named})):
        listed = ", ".join(named)
        raise ConfigError(f"arguments for {', '.join(stray)}, which is not among the methods {listed}")


def known_networks() -> list[Described]:
    """List all networks that have a name."""
    return [*map(_network, _networks()), *_added(plugins.NETWORKS, _networks())]


def check_network(name: str) -> None:
    """Check that a network is a known name or a class path, as `check_methods`."""
    if "." not in name and plugins.find(plugins.NETWORKS, name, _networks()) is None:
        check_name("network", name, [*_networks(), *plugins.names(plugins.NETWORKS, _networks())])


def describe_network(name: str) -> Described:
    """Describe a network and its arguments."""
    check_network(name)
    plugin = plugins.find(plugins.NETWORKS, name, _networks())
    if plugin is None:
        return _network(name, details=True)
    found = _of_plugin(plugin)
    what = _sentence(found.docstring().summary) if found else ""
    return Described(name, what, arguments=_network_arguments(found, {}), package=plugin.package)


def check_name(kind: str, name: str, known: Iterable[str | Described]) -> None:
    """Check that a name is one of the known ones."""
    names = [one if isinstance(one, str) else one.name for one in known]
    if name not in names:
        raise ConfigError(f"{kind} {name!r} {not_known(name, names)}")


def _added(group: str, built_in: Iterable[str]) -> list[Described]:
    packages = {plugin.name: plugin.package for plugin in plugins.installed(group)}
    return [Described(name, package=packages[name]) for name in plugins.names(group, [*built_in])]


def _of_plugin(plugin: plugins.Plugin) -> Definition | None:
    return find_definition(f"{plugin.entry.module}.{plugin.entry.attr}")


@cache
def _methods() -> dict[str, Definition]:
    """Find the built-in methods by name, in the list that docs/generate.py writes."""
    found = []
    for folder in ("methods", "research.methods"):
        listed = read_source(f"medfedaug.{folder}.catalogue")
        for node in listed.tree.body if listed else ():
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                found.append(definition(f"{node.module}.{node.names[0].name}"))
    found.sort(key=lambda method: method.source.name.rpartition(".")[2])
    return {str(method.source.value(_member(method, "name"))): method for method in found}


@cache
def _combinations() -> dict[str, list[dict[str, Any]]]:
    registry = source_of("medfedaug.methods.registry")
    combinations: dict[str, list[dict[str, Any]]] = registry.value(ast.Name("COMBINATIONS"))
    return combinations


def _method_names() -> list[str]:
    return [*_methods(), *_combinations()]


def _listed(name: str, method: Definition) -> Described:
    """Describe a method in one line."""
    base = definition(_METHOD)

    def has(hook: str) -> bool:
        return next((one.node is not base.node for one in method.lineage if hook in one.members()), False)

    times = ["less"] if has("local_entries") else []
    times += ["once"] if has("before_training") else []
    times += ["every round"] if has("every_round") else []
    limits = [*_value(method, "tasks")] if has("tasks") else []
    limits += [f"{n}D" for n in _value(method, "dimensions")] if has("dimensions") else []
    pools = "separate_sites" in _words(method, "excludes")
    facts = {BESIDE_THE_MODEL: "the images themselves" if pools else "; ".join(times) or "nothing"}
    facts |= {ONLY_FOR: ", ".join(limits)} if limits else {}
    what = method.docstring().summary
    if method.source.name.startswith("medfedaug."):  # a file is a method; its first line describes it
        title, _, does = (ast.get_docstring(method.source.tree) or "").partition("\n")[0].partition(": ")
        what = does or title or what
    return Described(name, what[:1].upper() + what[1:], facts, facts)


def _method(name: str, method: Definition, package: str = "") -> Described:
    line, doc = _listed(name, method), method.docstring()
    facts = dict(line.facts)
    exchanged = [text for text in doc.paragraphs if text.startswith("Exchange")]
    if exchanged:
        facts[BESIDE_THE_MODEL] = f"{line.facts[BESIDE_THE_MODEL]}. {' '.join(exchanged)}"
    words = _words(method, "provides")
    if included := sorted(word[len("method:") :] for word in words if word.startswith("method:")):
        facts["includes"] = ", ".join(included)
    text = [doc.summary, *(text for text in doc.paragraphs if text not in exchanged)]
    if differs := doc.sections.get("Deviations"):
        text.append(f"Deviations: {differs}")
    return Described(name, line.what, line.facts, facts, tuple(text), tuple(method.parameters()), package)


def _combination(name: str) -> Described:
    parts = []
    for part in _combinations()[name]:
        arguments = "".join(f" with {k}={json.dumps(v)}" for k, v in part.get("args", {}).items())
        parts.append(part["name"] + arguments)
    facts = {BESIDE_THE_MODEL: "as there"}
    return Described(name, f"The same as {' and '.join(parts)}.", facts, facts)


@cache
def _networks() -> dict[str, tuple[str, str, dict[str, str]]]:
    """Read the table of networks: the task, the path of the class, and arguments with other defaults."""
    source = source_of("medfedaug.models.networks")
    found = {}
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "_NETWORKS.update":
            for entry in call.keywords:
                assert isinstance(entry.value, ast.Call)
                of_monai = "Classifier" not in ast.unparse(entry.value.func)
                defaults: dict[str, Any] = {}
                for given in entry.value.keywords:
                    if given.arg is None:
                        defaults |= source.value(given.value)
                    elif given.arg != "names":
                        defaults[given.arg] = source.value(given.value)
                task = "segmentation" if of_monai else "classification"
                written = {key: json.dumps(value) for key, value in defaults.items()}
                found[str(entry.arg)] = (task, source.dotted(entry.value.args[:2][-1]), written)
    return dict(sorted(found.items()))


def _network(name: str, details: bool = False) -> Described:
    task, path, defaults = _networks().get(name, ("", name, {}))
    network = find_definition(path)
    if network is None:
        raise ConfigError(f"network {name!r}: no class of that path")
    summary = _sentence(network.docstring().summary)
    what = f"MONAI's {network.node.name}: {summary}" if path.startswith("monai.") else summary
    facts = {"for": task} if task else {}
    arguments = _network_arguments(network, defaults) if details else ()
    if task == "classification":  # the builder fills in arguments without a default
        arguments = tuple(argument for argument in arguments if argument.default)
    return Described(name, what, facts, facts, arguments=arguments)


def _network_arguments(network: Definition | None, defaults: Mapping[str, str]) -> tuple[Parameter, ...]:
    parameters = network.parameters() if network else []
    return tuple(
        Parameter(p.name, defaults.get(p.name, p.default), _sentence(p.text))
        for p in parameters
        if p.name not in _SETTLED
    )


def _member(definition: Definition, name: str) -> ast.expr:
    for one in definition.lineage:
        if name in one.members():
            member = one.members()[name]
            assert isinstance(member, ast.expr)
            return member
    raise ConfigError(f"the class {definition.node.name} has no {name}")


def _value(definition: Definition, name: str) -> Sequence[Any]:
    value: Sequence[Any] = definition.source.value(_member(definition, name))
    return value


def _words(definition: Definition, name: str) -> set[str]:
    """Return the words in a declaration."""
    nodes = ast.walk(_member(definition, name))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def definition(path: str) -> Definition:
    """Return the definition of a class of this package."""
    found = find_definition(path)
    assert found is not None, path
    return found


def source_of(module: str) -> Source:
    """Return the source of a module of this package."""
    found = read_source(module)
    assert found is not None, module
    return found


def _sentence(text: str) -> str:
    """Return the first sentence of a text, or the whole text."""
    return text.partition(". ")[0].rstrip(".:") + "." if text else ""
