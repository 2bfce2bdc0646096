"""Docstrings and help texts begin with a verb or a standard noun; public names are words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from our_modules import modules

OPENINGS = {"What", "Whatever", "Whether", "That", "Those", "How", "Which", "Who", "Whoever", "Whom", "Whose"}
OPENINGS |= {"Where", "When", "Why", "Of", "Something"}
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
RIDDLES = {"told", "beside", "spelt"}
PACKAGES = sorted({".".join(name.split(".")[:2]) for name in modules()})


def string(node: ast.AST | None) -> str:
    """The text of a literal, also of one in several parts or in an expression; empty for anything else."""
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.BinOp):
        return string(node.left) + string(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def public(body: list[ast.stmt], path: str) -> Iterator[tuple[str, str]]:
    """The public names of a module or class with their docstrings, among them strings under assignments."""
    for node, after in pairwise([*body, None]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            documented = [(node.name, ast.get_docstring(node) or "")]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            documented = [(one.id, string(after)) for one in targets if isinstance(one, ast.Name)]
        else:
            continue
        for name, text in documented:
            if not name.startswith("_"):
                yield f"{path}.{name}", text
                if isinstance(node, ast.ClassDef):
                    yield from public(node.body, f"{path}.{name}")


def helps(tree: ast.AST) -> Iterator[str]:
    """The help texts of commands, and the texts of settings, of which options are made."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        yield from (string(keyword.value) for keyword in call.keywords if keyword.arg == "help")
        if isinstance(call.func, ast.Name) and call.func.id == "setting":
            yield from map(string, call.args[1:2])


def opening(text: str) -> str:
    return (text.split() or [""])[0].rstrip(",.:;")


def riddles(name: str, tree: ast.Module) -> list[str]:
    """The texts of a module that begin with a word of `OPENINGS`."""
    texts = [(name, ast.get_docstring(tree) or ""), *public(tree.body, name)]
    texts += [
        (f"{name}, {node.name}", ast.get_docstring(node) or "")
        for node in ast.walk(tree)
        if isinstance(node, _NAMED)
    ]
    texts += [(f"{name}, help", text) for text in helps(tree)]
    return [f"{path}: {text.splitlines()[0]}" for path, text in texts if opening(text) in OPENINGS]


@pytest.mark.parametrize("package", PACKAGES)
def test_texts_begin_with_a_verb_or_a_noun(trees, package):
    inside = [name for name in trees if name.startswith(f"{package}.") and package != "medfedaug"]
    assert not [riddle for name in (package, *inside) for riddle in riddles(name, trees[name])]


def test_public_names_are_words_of_the_field(trees):
    names = {path for name, tree in trees.items() for path, _ in public(tree.body, name)}
    assert not {path for path in names if RIDDLES & set(words(path.rpartition(".")[2]))}


def test_no_variable_is_named_for_having_been_found(trees):
    """`found` and `told` hold anything: the noun for the content says more."""
    named = {
        (name, node.arg if isinstance(node, ast.arg) else node.id)
        for name, tree in trees.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
    assert not {(name, variable) for name, variable in named if variable in ("found", "told")}


def words(name: str) -> list[str]:
    """The words of a name: ``AggregatorExchange`` and ``has_loss`` have two each."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]
