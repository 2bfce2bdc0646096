"""What an installed user gets, and what the layers of the package may import."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Collection
from pathlib import Path

import pytest
from our_modules import ROOT, modules
from packaging.utils import canonicalize_name

APART = ("models", "nvflare_jobs", "transforms")


@pytest.mark.slow  # `make wheel` runs it
def test_the_wheel_holds_every_module_and_nothing_generic(tmp_path):
    folder = Path(os.environ.get("MEDFEDAUG_WHEEL", tmp_path))
    if folder == tmp_path:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*build, str(ROOT), "-w", str(tmp_path)], check=True, cwd=tmp_path)
    (wheel,) = folder.glob("*.whl")
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    assert {p.name for p in target.iterdir() if not p.name.endswith(".dist-info")} == {"medfedaug"}
    assert (target / "medfedaug/py.typed").exists()
    tables, installed = (
        {
            path.relative_to(root)
            for ending in ("csv", "yml")
            for path in root.glob(f"medfedaug/**/*.{ending}")
        }
        for root in (ROOT, target)
    )
    assert len(tables) > 10
    assert tables <= installed
    script = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1]); import medfedaug; "
        "assert medfedaug.__file__.startswith(sys.argv[1]), medfedaug.__file__; "
        "[importlib.import_module(name) for name in sys.argv[2:]]"
    )
    names = [*modules()]
    # Isolated from the working folder; the folder of an installation comes later.
    subprocess.run([sys.executable, "-I", "-c", script, str(target), *names], check=True, cwd=tmp_path)


def test_type_checkers_find_the_package_where_python_does(tmp_path):
    """They know the folders of `sys.path`, and no hook that finds modules as Python runs."""
    script = "import sys; print(*sys.path, sep='\\n')"
    run = [sys.executable, "-I", "-c", script]
    folders = subprocess.run(run, check=True, cwd=tmp_path, text=True, capture_output=True).stdout
    (package,) = {
        p for p in (Path(f, "medfedaug") for f in folders.splitlines()) if (p / "py.typed").exists()
    }
    for name in APART:
        assert (package / name / "__init__.py").exists()


def test_a_checkout_beside_another_takes_no_part_of_it(tmp_path):
    """Python is started in it, with the other one installed."""
    shutil.copytree(
        ROOT / "medfedaug", tmp_path / "medfedaug", symlinks=True, ignore=shutil.ignore_patterns("__*__")
    )
    for name in APART:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "medfedaug/__init__.py").touch()
    names = [f"medfedaug.{name}" for name in ("utils", *APART)]
    script = (
        f"from importlib.util import find_spec; print(*(find_spec(n).origin for n in {names}), sep='\\n')"
    )
    run = [sys.executable, "-c", script]
    files = subprocess.run(run, check=True, cwd=tmp_path, text=True, capture_output=True).stdout
    assert all(Path(file).resolve().is_relative_to(tmp_path) for file in files.splitlines()), files


def imports(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


IMPORTED_AS = {
    "PIL": "pillow",
    "dicomanonymizer": "dicom-anonymizer",
    "ignite": "pytorch-ignite",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def test_every_package_that_is_imported_is_declared(trees):
    """Packages of an extra are declared too, and each one that every user installs is imported."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    parts = re.split(r"^(?:dependencies = |\[project\.(?:optional|scripts))", text, flags=re.MULTILINE)[1:3]
    always, extras = (
        {canonicalize_name(name) for name in re.findall(r'"([\w-]+)(?:\[.*?\])?>=', part)} for part in parts
    )
    used = {name.partition(".")[0] for tree in trees.values() for name in imports(tree)}
    used -= {*sys.stdlib_module_names, "medfedaug", ""}
    names = {canonicalize_name(IMPORTED_AS.get(name, name)) for name in used}
    assert always <= names <= always | extras


@pytest.mark.parametrize(
    "layer", ["functional", "statistics", "methods", "federation", "transforms", "models", "tasks"]
)
def test_only_nvflare_jobs_imports_nvflare(trees, layer):
    for name, tree in trees.items():
        if name.startswith(f"medfedaug.{layer}"):
            wrong = {i for i in imports(tree) if i.startswith(("nvflare", "medfedaug.nvflare_jobs"))}
            assert not wrong, f"{name} imports {wrong}"


def imported_on_import(name: str, tree: ast.AST, known: Collection[str]) -> set[str]:
    """The modules of ours that importing this one imports: not those in functions or under TYPE_CHECKING."""
    imported: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            imported.update(full[n] if full[n] in known else str(node.module) for n in full)
        pending.extend(ast.iter_child_nodes(node))
    # A module's packages are imported before it; its own are under way already.
    around = {name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)}
    parents = {f.rsplit(".", depth)[0] for f in imported for depth in range(f.count(".") + 1)}
    return (parents & set(known)) - (around - imported) - {name}


LONG = {
    # A command, whose options are its parameters.
    "medfedaug.cli": "benchmark compare export import_ predict simulate site_config",
    # Its arguments are described and checked one by one.
    "medfedaug.data.datasets.phantom": "make_phantom",
    "medfedaug.simulate": "simulate",
}
"""Functions of more than 80 lines, by module or package."""


def test_no_other_function_has_more_than_80_lines(trees):
    long = {
        (name, node.name)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 80
    }
    named = {(module, function) for module, text in LONG.items() for function in text.split()}
    known = {("medfedaug.cli" if name.startswith("medfedaug.cli.") else name, f) for name, f in long}
    assert known == named


def test_no_call_splats_a_tuple_that_it_writes(trees):
    calls = [
        (name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)
    ]
    assert not [
        (name, node.lineno)
        for name, node in calls
        if any(isinstance(one, ast.Starred) and isinstance(one.value, ast.Tuple) for one in node.args)
    ]


def test_no_module_imports_itself_by_way_of_others(trees):
    remaining = {name: imported_on_import(name, tree, trees) for name, tree in trees.items()}
    while free := {name for name, needed in remaining.items() if not needed & set(remaining)}:
        remaining = {name: needed for name, needed in remaining.items() if name not in free}
    circle = {name: sorted(needed & set(remaining)) for name, needed in remaining.items()}
    assert not circle


def test_the_federation_names_no_method(trees):
    for name, tree in trees.items():
        if name.startswith("medfedaug.federation"):
            wrong = {
                i
                for i in imports(tree)
                if i.startswith("medfedaug.methods.") and not i.endswith((".base", ".compatibility"))
            }
            assert not wrong, f"{name} imports {wrong}"


def test_the_command_answers_before_torch_is_imported():
    script = "import sys; import medfedaug.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_one_module_alone_knows_the_order_of_a_federation(trees):
    verbs = {"finish_preparation", "finish_validation", "accept_preparation", "accept_test"}
    verbs |= {"accept_loan", "accept_scores"}
    users = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in verbs
    }
    assert users == {"medfedaug.federation.protocol"}
