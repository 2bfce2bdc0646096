"""The packages that pages show, as pip installs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def install(page: str, heading: str, module: str, source: Path, target: Path) -> Path:
    """Install the package of a section, whose blocks are its `pyproject.toml` and its module."""
    text = (DOCS / page).read_text().split(f"{heading}\n", 1)[1]
    for language, file in (("toml", "pyproject.toml"), ("python", f"{module}.py")):
        block = re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
        (source / file).write_text(block[1])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """The package of `docs/methods.md`, as pip installs it, in a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    return install("methods.md", "## A method in a package of your own", "lesion_methods", source, target)


@pytest.fixture
def package(installed, monkeypatch) -> Path:
    """The package can be imported here, and in the processes that are started from here."""
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", str(installed))
    return installed
