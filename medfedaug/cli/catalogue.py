"""The methods, networks and data sets that a user can choose, and the commands that list them.

Methods and networks are read from their source files: an import of PyTorch and MONAI takes seconds. A package
that adds a method is read in the same way.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

import medfedaug
from medfedaug.cli.console import Table, out_console, say
from medfedaug.errors import ConfigError
from medfedaug.utils import plugins
from medfedaug.utils.validation import check_choice, match_case, split_names

_HOME = Path(medfedaug.__file__).parent
_METHODS = (_HOME / "methods", _HOME / "research/methods")
Node = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Described:
    """A choice: its name, one line, and the lines of its description."""

    name: str
    what: str
    text: tuple[str, ...] = ()


def known_methods() -> list[Described]:
    """List all methods."""
    return [*(Described(name, line) for name, (line, _) in _methods().items()), *_added(plugins.METHODS)]


def describe_method(name: str) -> Described:
    """Describe a method by its docstring and arguments."""
    name = match_case(name, [*_methods(), *plugins.names(plugins.METHODS, _methods())])
    if plugin := plugins.find(plugins.METHODS, name, _methods()):
        return _of_plugin(plugin)
    check_choice("method", name, [one.name for one in known_methods()])
    line, node = _methods()[name]
    return Described(name, line, _description(node, *_METHODS) if node else ())


def check_methods(text: str, arguments: Iterable[str] = ()) -> None:
    """Check the names of methods, separated by commas, without importing any."""
    named: list[str] = []
    known = [*_methods(), *plugins.names(plugins.METHODS, _methods())]
    for part in split_names("methods", text):
        name = match_case(part, known)
        if plugins.find(plugins.METHODS, name, _methods()) is None:
            check_choice("method", name, known)
        named += [part["name"] for part in _combinations().get(name, [{"name": name}])]
    if named and (stray := sorted({*arguments} - {*named})):
        listed = ", ".join(named)
        raise ConfigError(f"arguments for {', '.join(stray)}, which is not among the methods {listed}")


def known_networks() -> list[Described]:
    """List all networks that have a name."""
    return [*(Described(name, line) for name, (line, _) in _networks().items()), *_added(plugins.NETWORKS)]


def check_network(name: str) -> None:
    """Check that a network is a known name or a class path, as `check_methods`."""
    if "." not in name and plugins.find(plugins.NETWORKS, name, _networks()) is None:
        check_choice("network", name, [*_networks(), *plugins.names(plugins.NETWORKS, _networks())])


def describe_network(name: str) -> Described:
    """Describe a network by the docstring and arguments of its class."""
    check_network(name)
    if plugin := plugins.find(plugins.NETWORKS, name, _networks()):
        return _of_plugin(plugin)
    line, path = _networks().get(name, ("One of MONAI's.", name))
    monai = find_spec("monai")
    nets = [Path(at, "networks/nets") for at in (monai.submodule_search_locations if monai else None) or ()]
    node = _find(path.rpartition(".")[2], _HOME / "models", *nets)
    if node is None:
        raise ConfigError(f"network {name!r}: no class of that path")
    return Described(name, line, _description(node, *nets))


def _added(group: str) -> Iterator[Described]:
    built_in = _methods() if group == plugins.METHODS else _networks()
    packages = {plugin.name: plugin.package for plugin in plugins.installed(group)}
    for name in plugins.names(group, built_in):
        yield Described(name, f"Added by the package {packages[name]}.")


def _of_plugin(plugin: plugins.Plugin) -> Described:
    top, *below = plugin.entry.module.split(".")
    spec = find_spec(top)
    files = [Path(spec.origin)] if spec and spec.origin else []
    if below and spec:
        files = [Path(at, *below).with_suffix(".py") for at in spec.submodule_search_locations or ()]
    node = next((node for file in files if (node := _node(file, plugin.entry.attr))), None)
    text = _description(node, *(file.parent for file in files)) if node else ()
    return Described(plugin.name, f"Added by the package {plugin.package}.", text)


@cache
def _methods() -> dict[str, tuple[str, ast.ClassDef | None]]:
    """Find the built-in methods by name: one line, and the class."""
    found: dict[str, tuple[str, ast.ClassDef | None]] = {}
    for file in sorted((file for folder in _METHODS for file in folder.glob("*.py")), key=lambda f: f.stem):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        title, _, does = (ast.get_docstring(tree) or "").partition("\n")[0].partition(": ")
        for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "name":
                    what = does or title
                    found[ast.literal_eval(line.value)] = (what[:1].upper() + what[1:], node)
    for name, parts in _combinations().items():
        words = (
            part["name"] + "".join(f" with {k}={json.dumps(v)}" for k, v in part.get("args", {}).items())
            for part in parts
        )
        found[name] = (f"The same as {' and '.join(words)}.", None)
    return found


@cache
def _combinations() -> dict[str, list[dict[str, Any]]]:
    tree = ast.parse((_HOME / "methods/registry.py").read_text(encoding="utf-8"))
    combinations: dict[str, list[dict[str, Any]]] = _constants(tree)["COMBINATIONS"]
    return combinations


@cache
def _networks() -> dict[str, tuple[str, str]]:
    """Read the table of networks: a line with the task and our defaults, and the path of the class."""
    tree = ast.parse((_HOME / "models/networks.py").read_text(encoding="utf-8"))
    values, found = _constants(tree), {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "_NETWORKS.update":
            for entry in call.keywords:
                assert isinstance(entry.value, ast.Call)
                path = ast.unparse(entry.value.args[:2][-1])
                given: dict[str, Any] = {}
                for part in entry.value.keywords:
                    value = eval(ast.unparse(part.value), values)
                    given |= value if part.arg is None else {part.arg: value}
                given.pop("names", None)
                task = "Classification" if "Classifier" in ast.unparse(entry.value.func) else "Segmentation"
                usual = ", ".join(f"{key}={value!r}" for key, value in given.items())
                title = path.replace("nets.", "MONAI's ")
                found[str(entry.arg)] = (f"{task}: {title}{f' with {usual}' if usual else ''}.", path)
    return dict(sorted(found.items()))


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names of a module that are assigned constants, or expressions of constants."""
    values: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            with suppress(Exception):  # the others need imports
                exec(compile(ast.Module([node], []), "constants", "exec"), values)
    return values


def _find(name: str, *folders: Path) -> Node | None:
    """Find a class or function in the files of folders."""
    pattern = re.compile(rf"^(class|def) {re.escape(name)}\b", re.MULTILINE)
    for file in (file for folder in folders for file in sorted(folder.glob("*.py"))):
        if pattern.search(file.read_text(encoding="utf-8")):
            return _node(file, name)
    return None


def _node(file: Path, name: str) -> Node | None:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return next((node for node in body if isinstance(node, Node) and node.name == name), None)


def _description(node: Node, *folders: Path) -> tuple[str, ...]:
    """Return the arguments of a function or class, and its docstring without markup."""
    init = _constructor(node, folders)
    arguments = re.sub(r"^self(, )?", "", ast.unparse(init.args)) if init else ""
    texts = [ast.get_docstring(one) or "" for one in ([node] if init in (node, None) else [node, init])]
    return (f"{node.name}({arguments})", "", *without_markup("\n\n".join(filter(None, texts))))


def without_markup(docstring: str) -> list[str]:
    """Return the lines of a docstring for a terminal."""
    return re.sub(r"(?::\w+)+:(?=`)|`|\\(?=\*)", "", inspect.cleandoc(docstring)).splitlines()


def _constructor(node: Node, folders: Iterable[Path]) -> ast.FunctionDef | None:
    if isinstance(node, ast.FunctionDef):
        return node
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return inner
    bases = (_find(ast.unparse(base).rpartition(".")[2], *folders) for base in node.bases)
    return next((init for base in bases if base and (init := _constructor(base, folders))), None)


def methods(
    name: Annotated[str | None, Argument(help="A method, to show its arguments and details.")] = None,
) -> None:
    """List the methods for --methods, or show one: effect, arguments, and data that leave a site."""
    if name is None:
        _print_list(known_methods())
        say("Several go together, separated by commas: --methods fedrdn,fedfa")
        say("Arguments and details of one: medfedaug methods NAME")
    else:
        described = describe_method(name)
        _print_one(described, f"--set {described.name}.ARGUMENT=VALUE")


def networks(
    name: Annotated[str | None, Argument(help="A network, or MONAI's class path, to show in detail.")] = None,
) -> None:
    """List the networks for --network, or show the arguments of one."""
    if name is None:
        _print_list(known_networks())
        say("Any other network of MONAI has its class path: monai.networks.nets.HighResNet")
        say("Arguments of one: medfedaug networks NAME")
    else:
        _print_one(describe_network(name), "--network-args '{\"ARGUMENT\": VALUE}'")


def datasets(
    name: Annotated[str | None, Argument(help="A data set, to show address, layout, options.")] = None,
) -> None:
    """List published data sets, or show one: address, layout of its folder, options, protocols."""
    from medfedaug.research.datasets.benchmarks import BENCHMARKS
    from medfedaug.research.datasets.published import COMMON_OPTIONS, FOLDS, OPTION_TEXTS
    from medfedaug.research.papers.presets import PRESETS

    if name is None:
        _print_list(Described(name, known.description) for name, known in BENCHMARKS.items())
        say("Address, layout, options and protocols of one: medfedaug datasets NAME")
        say("Data of your own need no name: one folder per site, as docs/data.md shows")
        return
    check_choice("data set", name, BENCHMARKS)
    known = BENCHMARKS[name]
    protocols = ", ".join(preset.name for preset in PRESETS.values() if preset.benchmark == name)
    lines = [f"get it from: {known.source}", f"layout: {known.layout}", f"protocols: {protocols}", ""]
    lines += [*without_markup(known.open.__doc__ or ""), ""]
    options = {**COMMON_OPTIONS, **(FOLDS if known.in_folds else {})}
    lines += [f"{key}={value!r}: {OPTION_TEXTS[key]}" for key, value in options.items()]
    _print_one(Described(name, known.description, tuple(lines)), "--set OPTION=VALUE")


def _print_list(choices: Iterable[Described]) -> None:
    table = Table("name", "what", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for choice in choices:
        table.add_row(choice.name, choice.what)
    out_console.print(table)


def _print_one(choice: Described, example: str) -> None:
    say(f"{choice.name}: {choice.what}")
    for line in (f"Arguments are given as {example}", "", *choice.text) if choice.text else ():
        say(line)
