"""A run's folder. Only files that a run wrote are deleted or replaced."""

import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from medfedaug.errors import ConfigError, first_line
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
)
from medfedaug.federation.messages.checkpoint import CHECKPOINT_FORMAT, server_checkpoint
from medfedaug.runs.leftovers import LOCK, WORKSPACE, is_json_with, locked, workspaces
from medfedaug.utils.files import parse_versioned, write_versioned

LOG = "nvflare.log"

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
    file.parent.mkdir(parents=True, exist_ok=True)
    write_versioned(file, _DATA_KIND, _DATA_VERSION, {"files": fingerprint})


def kept_fingerprint(state: Path) -> dict[str, str]:
    """Read the file of `keep_fingerprint`."""
    file = server_checkpoint(state).with_name(_DATA)
    try:
        fingerprint: dict[str, str] = parse_versioned(file.read_text(), _DATA_KIND, _DATA_VERSION)["files"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}: {first_line(error)}") from error
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
    if _UNFINISHED.fullmatch(path.name):
        return True
    try:
        with zipfile.ZipFile(path) as archive:  # without its tensors, which may be large
            content = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return CHECKPOINT_FORMAT.encode() in archive.read(content)
    except (OSError, StopIteration, zipfile.BadZipFile):
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
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be made ({error.strerror})") from error
    file = out / LOCK
    with locked(file, f"{out}: another process is making this run"):
        try:
            _wait_for_sites(out)
            yield
        finally:
            file.unlink(missing_ok=True)
            if new:
                with suppress(OSError):  # not empty
                    out.rmdir()


def _wait_for_sites(out: Path) -> None:
    """Wait until the sites of a killed process have ended, too."""
    file = sites_lock(out)
    if not file.exists():
        return
    busy = f"{out}: sites of an earlier process are still at work on this run"
    with locked(file, busy, timeout=_WAIT_FOR_SITES):
        file.unlink(missing_ok=True)
