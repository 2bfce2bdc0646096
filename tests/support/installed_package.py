"""The package of `docs/methods.md`, as pip installs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/methods.md"


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """The package of `docs/methods.md`, as pip installs it, in a folder of its own."""
    section = PAGE.read_text().split("## A method in a package of your own")[1]
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for language, file in (("toml", "pyproject.toml"), ("python", "lesion_methods.py")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)
        (source / file).write_text(block)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


@pytest.fixture
def package(installed, monkeypatch) -> Path:
    """The package can be imported here, and in the processes that are started from here."""
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", str(installed))
    return installed
