"""Find classes and functions in the source files of installed packages, without importing them."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from medfedaug.cli.docstrings import Docstring, parse_docstring

Node = ast.ClassDef | ast.FunctionDef


class NotConstant(ValueError):
    """An expression is more than constants."""


@dataclass(frozen=True)
class Source:
    """A module's source.

    Args:
        name: the module.
        tree: its statements.
        is_package: flag for the ``__init__.py`` of a package.
    """

    name: str
    tree: ast.Module
    is_package: bool

    def dotted(self, expression: ast.expr) -> str:
        """Return the path of a name such as ``nets.UNet`` here; empty for another expression."""
        if isinstance(expression, ast.Attribute):
            inner = self.dotted(expression.value)
            return f"{inner}.{expression.attr}" if inner else ""
        if not isinstance(expression, ast.Name):
            return ""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom | ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name) == expression.id:
                        return f"{self.origin(node)}{alias.name}"
        return f"{self.name}.{expression.id}"

    def origin(self, node: ast.ImportFrom | ast.Import) -> str:
        """Return the package of an import, with its dot; empty for ``import``."""
        if isinstance(node, ast.Import):
            return ""
        above = self.name.split(".")
        above = above[: len(above) - node.level + self.is_package] if node.level else []
        return "".join(f"{part}." for part in (*above, node.module) if part)

    def value(self, expression: ast.expr) -> Any:
        """Return the value of an expression of constants, and of names of constants."""
        match expression:
            case ast.Constant():
                return expression.value
            case ast.Name():
                return self._named(expression)
            case ast.Attribute():
                return self._enumerated(expression)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return [value for element in elements for value in self._unpacked(element)]
            case ast.Dict():
                content: dict[Any, Any] = {}
                for key, value in zip(expression.keys, expression.values, strict=True):
                    content |= self.value(value) if key is None else {self.value(key): self.value(value)}
                return content
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(expression.operand)
            case ast.BinOp(op=ast.Mult()):
                return self.value(expression.left) * self.value(expression.right)
            case ast.BinOp(op=ast.Add()):
                return self.value(expression.left) + self.value(expression.right)
        raise NotConstant(ast.unparse(expression))

    def written(self, expression: ast.expr) -> str:
        """Return the value of an expression as JSON; its source if it is more than constants."""
        try:
            return json.dumps(self.value(expression))
        except NotConstant as other:
            return str(other)

    def _unpacked(self, element: ast.expr) -> list[Any]:
        return self.value(element.value) if isinstance(element, ast.Starred) else [self.value(element)]

    def _named(self, expression: ast.Name) -> Any:
        if (assigned := self.assigned(expression.id)) is not None:
            return self.value(assigned)
        module, _, name = self.dotted(expression).rpartition(".")
        other = read_source(module) if module != self.name else None
        if other is None:
            raise NotConstant(expression.id)
        return other.value(ast.Name(name))

    def _enumerated(self, expression: ast.Attribute) -> Any:
        found = find_definition(self.dotted(expression.value))
        member = found.members().get(expression.attr) if found else None
        if found is None or not isinstance(member, ast.Constant):
            raise NotConstant(ast.unparse(expression))
        return member.value

    def assigned(self, name: str) -> ast.expr | None:
        """Return the expression that a name of the module is assigned; None for any other name."""
        found: ast.expr | None = None
        for node in self.tree.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    names, values = _elements(target, several), _elements(node.value, several)
                    for one, value in zip(names, values, strict=False):
                        found = value if isinstance(one, ast.Name) and one.id == name else found
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found = (node.value or found) if node.target.id == name else found
            elif isinstance(node, ast.AugAssign) and getattr(node.target, "id", "") == name and found:
                found = ast.Dict(keys=[None, None], values=[found, node.value])
        return found


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function: its default as JSON or source, empty if it needs a value, and its text."""

    name: str
    default: str = ""
    text: str = ""


@dataclass(frozen=True)
class Definition:
    """A class or a function in its module."""

    source: Source
    node: Node

    @property
    def lineage(self) -> tuple[Definition, ...]:
        """The class and its base classes, as far as their sources are installed; of a function, itself."""
        bases = self.node.bases if isinstance(self.node, ast.ClassDef) else []
        found = [find_definition(self.source.dotted(base)) for base in bases]
        return (self, *(one for base in found if base for one in base.lineage))

    def members(self) -> dict[str, ast.expr | ast.FunctionDef]:
        """Return the functions and the assigned values in the body of the class."""
        found: dict[str, ast.expr | ast.FunctionDef] = {}
        for node in self.node.body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
                found[node.target.id] = node.value
        return found

    def docstring(self) -> Docstring:
        """Read the docstring of the function, or of the class and its constructor."""
        init = self.members().get("__init__") if isinstance(self.node, ast.ClassDef) else None
        texts = [ast.get_docstring(node) for node in (self.node, init) if isinstance(node, Node)]
        return parse_docstring(*texts)

    def parameters(self) -> list[Parameter]:
        """Return the parameters of the function or constructor, and those that it passes on to a base class.

        A subclass provides what its base class needs.
        """
        if isinstance(self.node, ast.FunctionDef):
            return [*self._of(self.node, self.docstring().arguments)]
        parameters: dict[str, Parameter] = {}
        for one in self.lineage:
            init = one.members().get("__init__")
            if isinstance(init, ast.FunctionDef):
                texts = {**one.docstring().arguments, **self.docstring().arguments}
                _, *own = one._of(init, texts)
                if parameters:
                    own = [Parameter(p.name, p.default or "null", p.text) for p in own]
                parameters = {p.name: p for p in own} | parameters
                if not init.args.kwarg:
                    break
        return [*parameters.values()]

    def _of(self, function: ast.FunctionDef, texts: dict[str, str]) -> Iterator[Parameter]:
        arguments, defaults = [*function.args.posonlyargs, *function.args.args], function.args.defaults
        padded: list[ast.expr | None] = [*[None] * (len(arguments) - len(defaults)), *defaults]
        pairs = [*zip(arguments, padded, strict=True)]
        pairs += zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        for argument, default in pairs:
            text = "" if default is None else self.source.written(default)
            yield Parameter(argument.arg, text, texts.get(argument.arg, ""))


def _elements(expression: ast.expr, several: bool) -> list[ast.expr]:
    return expression.elts if several and isinstance(expression, ast.Tuple) else [expression]


@cache
def read_source(module: str) -> Source | None:
    """Read the source of a module; None if it has none here."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as `__main__`
        return None
    if spec is None:
        return None
    if rest:
        below = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
        candidates = [file for path in below for file in (path / "__init__.py", path.with_suffix(".py"))]
    else:
        candidates = [Path(spec.origin)] if spec.origin else []
    for file in candidates:
        if file.suffix == ".py" and file.is_file():
            return Source(module, ast.parse(file.read_bytes()), file.name == "__init__.py")
    return None


@cache
def find_definition(path: str) -> Definition | None:
    """Find the class or function of a path such as ``monai.networks.nets.UNet``, through imports.

    Example:
        >>> find_definition("medfedaug.errors.ConfigError").node.name
        'ConfigError'
    """
    return _find(path, set())


def _find(path: str, asked: set[str]) -> Definition | None:
    module, _, name = path.rpartition(".")
    if not module or path in asked:  # packages that import each other
        return None
    asked.add(path)
    source = read_source(module)
    if source is None:
        return None
    for node in source.tree.body:
        if isinstance(node, Node) and node.name == name:
            return Definition(source, node)
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name or alias.name == "*":
                    origin = name if alias.name == "*" else alias.name
                    if found := _find(f"{source.origin(node)}{origin}", asked):
                        return found
    return None
