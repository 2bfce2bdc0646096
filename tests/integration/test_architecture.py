"""Pages for developers: the picture shows the imports, and the files and functions that they name exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "docs/architecture.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs/decisions").glob("*.md")),
]
FOLDERS = ("medfedaug", "models", "transforms", "nvflare_jobs", "tests", "docs", "benchmarks")
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]*?)(?::([\w.]+))?`")
WALKS = re.compile(r"^### .*?(?=^##)", re.MULTILINE | re.DOTALL)


def defined(tree: ast.AST, name: str) -> bool:
    """Whether a module defines a function, a class or, as ``Class.method``, a method."""
    first, _, rest = name.partition(".")
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == first:
            return not rest or defined(node, rest)
    return False


def test_the_picture_shows_the_imports_of_the_code(tmp_path):
    """In a process of its own, since the picture is drawn from a copy of the package, as it is installed."""
    drawn = tmp_path / "house.svg"
    script = str(ROOT / "docs/pictures/house.py")
    subprocess.run([sys.executable, script, str(drawn)], check=True, cwd=tmp_path)
    committed = (ROOT / "docs/pictures/house.svg").read_text(encoding="utf-8")
    assert drawn.read_text(encoding="utf-8") == committed, "draw it anew: make catalogue"


def test_no_file_and_no_room_imports_itself_by_way_of_others(tmp_path):
    """Imports inside functions count: they are a way around a circle, and no way out of it."""
    script = (
        "import house; known = house.modules(); house.floors(known); "
        "packages = {module.rpartition('.')[0] for module in known} - {''}; "
        "[house.floors(house.imports(known, name.partition('.')[2])) for name in packages]"
    )
    pictures = {"PYTHONPATH": str(ROOT / "docs/pictures")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | pictures,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_file_and_function_that_a_page_names_is_there(page):
    named = NAMED.findall(page.read_text(encoding="utf-8"))
    missing = []
    for path, name in named:
        file = ROOT / path
        if not file.exists():
            missing.append(path)
        elif name and not defined(ast.parse(file.read_text(encoding="utf-8")), name):
            missing.append(f"{path}:{name}")
    assert not missing


def test_each_walk_has_five_to_ten_steps_and_each_step_names_a_function():
    walks = WALKS.findall((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert len(walks) == 5
    for walk in walks:
        steps = re.split(r"^\d+\. ", walk, flags=re.MULTILINE)[1:]
        assert 5 <= len(steps) <= 10, walk
        assert all(name for step in steps for _, name in NAMED.findall(step)), walk
        assert all(NAMED.search(step) for step in steps), walk


def test_ten_changes_are_described_on_both_pages():
    overview = (
        (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## Where a change goes")[2]
    )
    rows = re.findall(r"^\| (?:an? )?([a-z][^|]*) \|", overview, re.MULTILINE)[1:]  # without the heading
    full = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    described = re.findall(r"^\d+\. \*\*(?:An? )?([^*]+)\.\*\*", full, re.MULTILINE)
    assert len(described) == 10
    assert rows == [one[0].lower() + one[1:] for one in described]
