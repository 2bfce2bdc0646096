"""`benchmarks/robustness.py`, which has the attacks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def script():
    """`benchmarks/robustness.py`, which has the attacks."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import robustness

        yield robustness
    finally:
        sys.path.remove(folder)
        for name in ("robustness", "measure"):
            sys.modules.pop(name, None)
