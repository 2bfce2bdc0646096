"""Imports without garbage collection, which is on again whatever happens."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

from medfedaug.cli.loading import importing


def test_collection_is_off_while_importing_and_on_again_after_a_failed_import():
    assert gc.isenabled()
    with suppress(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    with importing():
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_compiling_at_every_start_is_told_once_with_its_remedy(tmp_path):
    program = """
from medfedaug.cli.loading import importing
for _ in range(2):
    with importing():
        pass
"""

    def said(**variables: str) -> str:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), **variables}
        run = [sys.executable, "-c", program]
        return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stderr

    told = said(PYTHONDONTWRITEBYTECODE="1")
    assert told.count("PYTHONDONTWRITEBYTECODE is set") == 1
    assert f"python -m compileall -q {Path(torch.__file__).parents[1]}" in told
    assert said(PYTHONDONTWRITEBYTECODE="") == ""
    compiled = tmp_path / Path(torch.__file__).parent.relative_to("/") / Path(torch.__cached__).name
    compiled.parent.mkdir(parents=True, exist_ok=True)
    compiled.touch()
    assert said(PYTHONDONTWRITEBYTECODE="1") == ""
