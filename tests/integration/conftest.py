"""Settings for all tests of whole federations."""

from __future__ import annotations

import ast

import pytest
from our_modules import modules


@pytest.fixture(autouse=True, scope="module")
def _as_in_other_processes(onednn):
    """Runs in this process are compared with those of other processes to the last bit."""


@pytest.fixture(scope="session")
def trees() -> dict[str, ast.Module]:
    """The modules of the package, parsed once."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}
