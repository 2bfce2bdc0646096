"""Imports large packages without collecting garbage, which imports hardly make."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from shlex import quote

from medfedaug.cli.console import say


@contextmanager
def importing() -> Iterator[None]:
    """Pause Python's search for cycles, which takes a fifth of the time of importing MONAI.

    Later collections skip the first imports: a million objects that live until the end.
    """
    _warn_of_compiling()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            _freeze()


@cache
def _freeze() -> None:
    """Freeze once per process: later objects are collected as usual."""
    gc.freeze()


@cache
def _warn_of_compiling() -> None:
    """Warn once that each start compiles the packages, if Python keeps no compiled files."""
    spec = find_spec("torch") if sys.dont_write_bytecode and "torch" not in sys.modules else None
    if spec is None or spec.origin is None or os.path.exists(cache_from_source(spec.origin)):
        return
    packages = quote(str(Path(spec.origin).parents[1]))
    say(
        "medfedaug: PYTHONDONTWRITEBYTECODE is set, and Python compiles PyTorch and MONAI at every start, "
        f"which takes longer than many commands. Compile once: python -m compileall -q {packages}",
        "yellow",
        err=True,
    )
