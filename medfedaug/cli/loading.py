"""Import large packages without collecting garbage, of which an import makes hardly any."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

__all__ = ["importing"]


@contextmanager
def importing() -> Iterator[None]:
    """A context in which Python does not look for cycles: a fifth of the time of importing MONAI.

    Later collections skip what the first such context imported: a million objects that live until the end.
    """
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
