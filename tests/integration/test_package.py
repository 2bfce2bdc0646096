"""What an installed user gets, and what the layers of the package may import."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from our_modules import FOLDERS, ROOT, modules


@pytest.mark.slow  # `make wheel` runs it
def test_the_wheel_holds_every_module_and_nothing_generic(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(ROOT)]
    subprocess.run([*build, "-w", str(tmp_path)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
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
    # Isolated from the working folder and from the editable install, whose finder comes later.
    subprocess.run([sys.executable, "-I", "-c", script, str(target), *modules()], check=True, cwd=tmp_path)


def test_the_folder_of_the_repository_hides_no_part_of_an_installed_package(tmp_path):
    """`pip install .`, and then Python is started in this folder, which comes first on its path."""
    script = (
        "import sys; from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder; "
        "sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]; "  # no editable install
        "sys.path.insert(0, sys.argv[1]); from importlib.util import find_spec; "
        "print(*(find_spec(name).origin for name in sys.argv[2:]), sep='\\n')"
    )
    run = [sys.executable, "-I", "-c", script, str(ROOT), *FOLDERS]
    found = subprocess.run(run, check=True, cwd=tmp_path, text=True, capture_output=True).stdout
    assert found.splitlines() == [str(ROOT / folder / "__init__.py") for folder in FOLDERS.values()]


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize(
    "layer", ["functional", "statistics", "methods", "federation", "transforms", "models", "tasks"]
)
def test_only_nvflare_jobs_imports_nvflare(layer):
    for name, path in modules().items():
        if name.startswith(f"medfedaug.{layer}"):
            wrong = {i for i in imports(path) if i.startswith(("nvflare", "medfedaug.nvflare_jobs"))}
            assert not wrong, f"{name} imports {wrong}"


def imported_on_import(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of ours that importing this one imports: not those in functions or under TYPE_CHECKING."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found.update(full[n] if full[n] in known else str(node.module) for n in full)
        pending.extend(ast.iter_child_nodes(node))
    # A module's packages are imported before it; its own are under way already.
    around = {name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)}
    parents = {f.rsplit(".", depth)[0] for f in found for depth in range(f.count(".") + 1)}
    return (parents & set(known)) - (around - found) - {name}


def test_no_module_imports_itself_by_way_of_others():
    known = modules()
    remaining = {name: imported_on_import(name, path, known) for name, path in known.items()}
    while free := {name for name, needed in remaining.items() if not needed & set(remaining)}:
        remaining = {name: needed for name, needed in remaining.items() if name not in free}
    circle = {name: sorted(needed & set(remaining)) for name, needed in remaining.items()}
    assert not circle


def test_the_federation_names_no_method():
    for name, path in modules().items():
        if name.startswith("medfedaug.federation"):
            wrong = {
                i
                for i in imports(path)
                if i.startswith("medfedaug.methods.") and not i.endswith((".base", ".compatibility"))
            }
            assert not wrong, f"{name} imports {wrong}"


def test_the_command_answers_before_torch_is_imported():
    script = "import sys; import medfedaug.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_one_module_alone_knows_the_order_of_a_federation():
    verbs = {"finish_preparation", "finish_validation", "accept_preparation", "accept_test"}
    verbs |= {"accept_loan", "accept_scores"}
    users = {
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in verbs
    }
    assert users == {"medfedaug.federation.protocol"}
