"""`FileState`, by which another version of a file is known."""

from __future__ import annotations

from pathlib import Path

FileState = tuple[str, int | None, int | None]
"""Absolute path, time of the last change in ns, and size; ``None`` for what is not there."""


def file_state(file: Path) -> FileState:
    """Return the state of one file."""
    if not file.exists():
        return str(file.absolute()), None, None
    status = file.stat()
    return str(file.absolute()), status.st_mtime_ns, status.st_size
