"""Imports large packages without collecting garbage, which imports hardly make."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def importing() -> Iterator[None]:
    """Pause Python's search for cycles, which takes a fifth of the time of importing MONAI.

    Later collections skip the first imports: a million objects that live until the end.
    """
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
