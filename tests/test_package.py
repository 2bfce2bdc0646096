"""What an installed user gets, and what the layers of the package may import."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "medfedaug": "medfedaug",
    **{f"medfedaug.{name}": name for name in ("transforms", "models", "nvflare_jobs")},
}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def test_the_wheel_holds_every_module_and_nothing_generic(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(ROOT)]
    subprocess.run([*build, "-w", str(tmp_path)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    assert {p.name for p in target.iterdir() if not p.name.endswith(".dist-info")} == {"medfedaug"}
    assert (target / "medfedaug/py.typed").exists()
    script = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1]); import medfedaug; "
        "assert medfedaug.__file__.startswith(sys.argv[1]), medfedaug.__file__; "
        "[importlib.import_module(name) for name in sys.argv[2:]]"
    )
    # Isolated from the working folder and from the editable install, whose finder comes later.
    subprocess.run([sys.executable, "-I", "-c", script, str(target), *modules()], check=True, cwd=tmp_path)


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


def test_the_federation_names_no_method():
    for name, path in modules().items():
        if name.startswith("medfedaug.federation"):
            wrong = {
                i for i in imports(path) if i.startswith("medfedaug.methods.") and not i.endswith(".base")
            }
            assert not wrong, f"{name} imports {wrong}"


def test_running_in_process_needs_no_nvflare():
    loaded = "any(m.split('.')[0] == 'nvflare' for m in sys.modules)"
    script = f"import sys; import medfedaug.simulate; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_command_answers_before_torch_is_imported():
    script = "import sys; import medfedaug.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
