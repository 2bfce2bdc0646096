"""What an installed user gets, and what the layers of the package may import."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from our_modules import ROOT, modules
from packaging.utils import canonicalize_name


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
    assert tables
    assert tables <= installed
    script = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1]); import medfedaug; "
        "assert medfedaug.__file__.startswith(sys.argv[1]), medfedaug.__file__; "
        "[importlib.import_module(name) for name in sys.argv[2:]]"
    )
    names = [*modules()]
    # Isolated from the working folder; the folder of an installation comes later.
    subprocess.run([sys.executable, "-I", "-c", script, str(target), *names], check=True, cwd=tmp_path)


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


IMPORTED_AS = {
    "PIL": "pillow",
    "dicomanonymizer": "dicom-anonymizer",
    "ignite": "pytorch-ignite",
    "yaml": "pyyaml",
}


def test_every_package_that_is_imported_is_declared():
    """Packages of an extra are declared too, and each one that every user installs is imported."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    parts = re.split(r"^(?:dependencies = |\[project\.(?:optional|scripts))", text, flags=re.MULTILINE)[1:3]
    always, extras = (
        {canonicalize_name(name) for name in re.findall(r'"([\w-]+)(?:\[.*?\])?>=', part)} for part in parts
    )
    used = {name.partition(".")[0] for path in modules().values() for name in imports(path)}
    used -= {*sys.stdlib_module_names, "medfedaug", ""}
    names = {canonicalize_name(IMPORTED_AS.get(name, name)) for name in used}
    assert always <= names <= always | extras
