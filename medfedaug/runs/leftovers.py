"""Workspaces of killed processes, and the user of a run's folder; without PyTorch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from medfedaug.errors import ConfigError
from medfedaug.utils.files import parse_json

LOCK, WORKSPACE = ".medfedaug.lock", ".medfedaug-run"
"""Files that mark the folder of a run in progress, and a workspace."""


def is_json_with(path: Path, *keys: str) -> bool:
    """Return whether a file holds a JSON object with these keys."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and set(keys) <= set(content)


def workspaces(out: Path) -> list[Path]:
    """Return the workspaces of killed processes, or of the one that makes the run."""
    pattern = re.compile(rf"\.{re.escape(out.name)}-[a-z0-9_]{{8}}")
    return [
        folder
        for folder in out.resolve().parent.iterdir()
        if pattern.fullmatch(folder.name) and (folder / WORKSPACE).exists()
    ]


@contextmanager
def locked(file: Path, message: str, timeout: float = 0) -> Iterator[None]:
    """Hold the lock of a file, which the system releases when the process dies."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=timeout)
    except Timeout as error:
        raise ConfigError(message) from error
    try:
        yield
    finally:
        lock.release()
