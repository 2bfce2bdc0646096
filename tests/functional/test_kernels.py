"""The kernels against float64, under Triton's interpreter: no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
FOLDER = Path(__file__).parent


def _run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_results_and_derivatives_under_the_interpreter():
    """Run in a new process, since Triton chooses the interpreter at its import."""
    cases = ("-q", "-p", "no:cacheprovider", "--noconftest", FOLDER / "kernel_cases.py")
    printed = _run("-m", "pytest", *cases, TRITON_INTERPRET="1")
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.slow
def test_all_kernels_compile_for_an_absent_gpu(tmp_path):
    printed = _run(FOLDER / "kernel_compilation.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(printed.split()) == 8
