"""Import large packages without collecting garbage, of which an import makes hardly any."""

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
    """A context in which Python does not look for cycles: a fifth of the time of importing MONAI.

    Later collections skip what the first such context imported: a million objects that live until the end.
    """
    _tell_of_compiling()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            _leave_alone()


@cache
def _leave_alone() -> None:
    """Once a process: what a command makes later is collected as ever."""
    gc.freeze()


@cache
def _tell_of_compiling() -> None:
    """Say once that each start compiles the packages, where Python keeps nothing of what it compiled."""
    found = find_spec("torch") if sys.dont_write_bytecode and "torch" not in sys.modules else None
    if found is None or found.origin is None or os.path.exists(cache_from_source(found.origin)):
        return
    packages = quote(str(Path(found.origin).parents[1]))
    say(
        "medfedaug: PYTHONDONTWRITEBYTECODE is set, and Python compiles PyTorch and MONAI at every start, "
        f"which takes longer than many commands. Compile once: python -m compileall -q {packages}",
        "yellow",
        err=True,
    )
