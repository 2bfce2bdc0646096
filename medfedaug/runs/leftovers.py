"""Files that a finished run no longer needs, and the user of its folder; without PyTorch."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from medfedaug.errors import ConfigError
from medfedaug.federation.job_folder import FINAL_MODEL, GLOBAL_MODEL, RESULTS, exchange_file
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


def spare_files(out: Path) -> dict[Path, int]:
    """Return what no command needs of a finished run, with sizes in bytes.

    These are the model of the last round beside the selected one, and workspaces of killed processes.
    """
    if not is_json_with(out / RESULTS, "config", "rounds", "test"):
        raise ConfigError(f"{out}: no finished run; name a folder with {RESULTS}")
    if (out / LOCK).exists():
        with locked(out / LOCK, f"{out}: another process is making this run"):
            pass
    last = out / FINAL_MODEL
    models = [last, exchange_file(last)] if (out / GLOBAL_MODEL).exists() else []
    spare = [*filter(Path.exists, models), *workspaces(out)]
    files = {path: [file for file in (path, *path.rglob("*")) if file.is_file()] for path in spare}
    return {path: sum(file.stat().st_size for file in inside) for path, inside in files.items()}


def free(path: Path) -> None:
    """Delete a file or folder of `spare_files`."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
