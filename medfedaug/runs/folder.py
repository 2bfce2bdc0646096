"""A run's folder and its user, without PyTorch. Only files that a run wrote are deleted or replaced."""

import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medfedaug.errors import ConfigError, config_errors, translated
from medfedaug.federation.job_folder import (
    CARDS,
    EVENTS,
    FINAL_MODEL,
    GLOBAL_MODEL,
    REPORT,
    RESULTS,
    STATE,
    STATISTICS,
    exchange_file,
    server_checkpoint,
)
from medfedaug.utils.files import parse_json, parse_versioned, write_versioned

LOG = "nvflare.log"
LOCK, WORKSPACE = ".medfedaug.lock", ".medfedaug-run"
"""Files that mark the folder of a run in progress, and a workspace."""

_FILES = (
    *(RESULTS, GLOBAL_MODEL, FINAL_MODEL, STATISTICS, REPORT, LOG, EVENTS, *CARDS),
    *(exchange_file(Path(model)).name for model in (GLOBAL_MODEL, FINAL_MODEL)),
)
# A checkpoint whose writer was killed (`medfedaug.utils.files.write_atomic`).
_UNFINISHED = re.compile(r"\.(medfedaug|[0-9a-f]{32})\.pt\.[a-z0-9_]{8}")
_SITES_LOCK = ".medfedaug.sites.lock"
# Orphaned sites end within a second or two.
_WAIT_FOR_SITES = 30.0
_DATA, _DATA_KIND, _DATA_VERSION = "data.json", "data", 1


def sites_lock(out: Path) -> Path:
    """Return the file that is locked while processes of sites are alive (`only_process`)."""
    return out / _SITES_LOCK


def keep_fingerprint(state: Path, fingerprint: Mapping[str, str]) -> None:
    """Record the data files with which a run begins."""
    file = server_checkpoint(state).with_name(_DATA)
    write_versioned(file, _DATA_KIND, _DATA_VERSION, {"files": fingerprint})


def kept_fingerprint(state: Path) -> dict[str, str]:
    """Read the file of `keep_fingerprint`."""
    file = server_checkpoint(state).with_name(_DATA)
    with config_errors(f"{file}: cannot be read", OSError, ValueError, KeyError):
        fingerprint: dict[str, str] = parse_versioned(file.read_text(), _DATA_KIND, _DATA_VERSION)["files"]
    return fingerprint


def check_results(out: Path) -> None:
    """Check that a run's files in ``out`` will only replace an earlier run's files."""
    state = out / STATE
    ours = is_json_with(out / RESULTS, "config", "rounds", "test") or server_checkpoint(state).is_file()
    for name in (*_FILES, STATE):
        path, folder = out / name, name == STATE
        if os.path.lexists(path) and (path.is_dir() != folder or not (folder or ours)):
            raise ConfigError(f"{path} is not of a run; choose another folder, or move the file away")


def remove_results(out: Path) -> None:
    """Delete an earlier run's files in ``out``, after `check_results`."""
    remove_state(out / STATE)
    for name in reversed(_FILES):  # the results last, which identify the folder as a run's
        (out / name).unlink(missing_ok=True)


def remove_state(state: Path, *, server_only: bool = False) -> None:
    """Delete the state of server and sites, or only of the server; other files stay."""
    folder = server_checkpoint(state).parent.name if server_only else "*"
    files = [path for path in state.glob(f"{folder}/*") if _is_checkpoint(path)]
    data = server_checkpoint(state).with_name(_DATA)
    _delete([*files, *([data] if is_json_with(data, "format", "files") else [])], state)


def _is_checkpoint(path: Path) -> bool:
    from medfedaug.federation.messages.checkpoint import CHECKPOINT_FORMAT  # and with it PyTorch

    if _UNFINISHED.fullmatch(path.name):
        return True
    with suppress(OSError, StopIteration, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        content = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return CHECKPOINT_FORMAT.encode() in archive.read(content)  # without tensors, which may be large
    return False


def _delete(files: Sequence[Path], root: Path) -> None:
    """Delete files, and their folders up to ``root`` if these become empty."""
    for path in files:
        path.unlink(missing_ok=True)
    parents = {parent for path in files for parent in path.parents if parent.is_relative_to(root)}
    for folder in sorted(parents, reverse=True):
        with suppress(OSError):  # not empty, or a link
            folder.rmdir()


def make_workspace(out: Path) -> Path:
    """Make a new folder next to ``out``, from which files move without a copy."""
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.resolve().parent))
    (work / WORKSPACE).touch()
    return work


def remove_workspaces(out: Path) -> None:
    """Delete the workspaces of killed processes."""
    for folder in workspaces(out):
        shutil.rmtree(folder, ignore_errors=True)


def publish(work: Path, out: Path, names: Sequence[str] = ()) -> None:
    """Move a workspace's files to ``out``, ``results.json`` last, since it marks a finished run."""
    files = [path for path in work.rglob("*") if path.is_file() and path.name != WORKSPACE]
    for file in sorted(files, key=lambda path: path.name == RESULTS):
        if not names or file.name in names:
            target = out / file.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)


@contextmanager
def only_process(out: Path) -> Iterator[None]:
    """Lock a run's folder for this process; remove it in the end if it is new and empty."""
    new = not out.exists()
    with config_errors(f"{out}: cannot be made", OSError):
        out.mkdir(parents=True, exist_ok=True)
    file = out / LOCK
    with locked(file, f"{out}: another process is making this run"):
        try:
            if (sites := sites_lock(out)).exists():  # those of a killed process, which end soon
                busy = f"{out}: sites of an earlier process are still at work on this run"
                with locked(sites, busy, timeout=_WAIT_FOR_SITES):
                    sites.unlink(missing_ok=True)
            yield
        finally:
            file.unlink(missing_ok=True)
            if new:
                with suppress(OSError):  # not empty
                    out.rmdir()


def is_json_with(path: Path, *keys: str) -> bool:
    """Return whether a file holds a JSON object with these keys."""
    content: Any = None
    with suppress(OSError, ValueError):
        content = parse_json(path.read_text(encoding="utf-8"))
    return isinstance(content, dict) and set(keys) <= set(content)


def check_replaces(path: Path, kind: str, *keys: str) -> None:
    """Check that a file replaces only one of its kind, a JSON object with these keys."""
    if path.exists() and not is_json_with(path, *keys):
        raise ConfigError(f"{path} exists and is not {kind}; choose another file with --out")


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
    with translated(Timeout, to=lambda error: ConfigError(message)):
        held = lock.acquire(timeout=timeout)
    with held:
        yield
