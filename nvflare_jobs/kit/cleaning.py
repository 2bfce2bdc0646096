"""Disk space of a kit: what jobs left behind, what of it may go, and what is still needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from medfedaug.errors import ConfigError
from medfedaug.federation.job_folder import JOB_FOLDER, RESULTS
from medfedaug.nvflare_jobs.kit.kit import Kit
from medfedaug.privacy import LEDGER_FILE
from medfedaug.privacy.pseudonyms import PSEUDONYM_KEY
from medfedaug.privacy.site_settings import SiteSettings

_DAY = 24 * 3600.0
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Of a run, of a round that was under way, and of what no site trains.
_RUN_OF_A_SITE = re.compile(r"[0-9a-f]{32}(\.half|\.frozen)?\.pt")
_PREPARED = re.compile(r"[0-9a-f]{32}")
_ROTATED = re.compile(r"(log|error_log|log_fl|audit)\.(txt|json|log)\.\d+")
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}")  # of a file that is written whole (`medfedaug.utils.files`)
_MARK = re.compile(r"\.[0-9a-f]{16}\.running")
_TEMPORARY = "medfedaug-*"

JOBS, STORE, STATE = "folders of jobs", "job store of the server", "state of runs"
SNAPSHOTS, PREPARED, LOGS = "snapshots of the server", "prepared images", "logs"
TEMPORARY, ACCOUNTS, OTHER = "temporary files", "ledger, keys and book of jobs", "everything else in the kit"
_RUNS = "a job is running here"


@dataclass(frozen=True)
class Leftover:
    """File or folder on the disk.

    Args:
        path: the file or folder.
        kind: what it is.
        size: in bytes.
        used: when it was last written, or read where that is known, in seconds since 1970.
        needed: why it stays; empty where it may go.
    """

    path: Path
    kind: str
    size: int
    used: float
    needed: str


def survey(kit: Kit, days: float, *, results: bool = False) -> list[Leftover]:
    """List everything that is on the disk for a kit.

    Nothing goes that is younger, that a job which runs here may use, or that no later job can replace: the
    ledger, the key of the pseudonyms, the book of jobs with its approvals, settings and certificates. What is
    not known by its name stays as well.

    Args:
        kit: the kit.
        days: the age from which on things may go.
        results: whether results of finished jobs may go too; at the server they may be the only copy.
    """
    return sorted(_Survey(kit, days, results).found(), key=lambda one: (one.kind, one.path))


def remove(leftover: Leftover) -> None:
    """Remove what may go. Of a link the link goes, and not what it points to."""
    if leftover.needed:
        raise ConfigError(f"{leftover.path}: stays: {leftover.needed}")
    try:
        if leftover.path.is_dir() and not leftover.path.is_symlink():
            shutil.rmtree(leftover.path)
        else:
            leftover.path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{leftover.path}: cannot be removed ({error.strerror})") from error


class _Survey:
    def __init__(self, kit: Kit, days: float, results: bool) -> None:
        self.kit, self.results = kit, results
        self.days, self.before = days, time.time() - days * _DAY
        self.settings = SiteSettings.load(kit.path)
        self.book = None if kit.server else kit.job_book()
        self.commands = _commands()
        self.running = self._runs()

    def found(self) -> Iterator[Leftover]:
        yield from self._kit()
        yield from self._state()
        if self.kit.server:
            yield from self._storage("uri_root", STORE, self._stored)
            yield from self._storage("root_dir", SNAPSHOTS, lambda path: self._of_job(path.name))
        yield from self._prepared()
        yield from self._temporary()

    def _kit(self) -> Iterator[Leftover]:
        inside = {self._state_root(), *(folder for folder, _ in self._storages()), self.settings.cache}
        for path in _entries(self.kit.path):
            if path in inside or any(other and other.is_relative_to(path) for other in inside):
                continue
            if path.is_dir() and _JOB.fullmatch(path.name):
                yield self._one(path, JOBS, self._of_job(path.name) or self._with_results(path))
            elif _ROTATED.fullmatch(path.name):
                yield self._one(path, LOGS, "")
            elif path.name.startswith(("log", "error_log", "audit")):
                yield self._one(path, LOGS, "it is written on")
            else:
                yield self._one(path, OTHER, "certificates, settings and what is not ours")

    def _state(self) -> Iterator[Leftover]:
        root = self._state_root()
        for path in _entries(root):
            if path.name in (LEDGER_FILE, f"{LEDGER_FILE}-wal", f"{LEDGER_FILE}-shm"):
                yield self._one(path, ACCOUNTS, "what has left this site, which limits what still may")
            elif path.is_dir() and not path.is_symlink():
                yield from self._state_of(path)
            else:
                yield self._other(path)

    def _state_of(self, folder: Path) -> Iterator[Leftover]:
        """The folder of the server, or of a site, below the state folder."""
        for path in _entries(folder):
            name = path.name
            if name == PSEUDONYM_KEY:
                yield self._one(path, ACCOUNTS, "the key of the pseudonyms")
            elif self.book is not None and path == self.book.folder:
                yield from self._book(path)
            elif path.suffix == ".pt" and (folder.name == "server" or _RUN_OF_A_SITE.fullmatch(name)):
                yield self._one(path, STATE, self._busy(path))
            else:
                yield self._other(path)

    def _book(self, folder: Path) -> Iterator[Leftover]:
        for path in _entries(folder):
            if _MARK.fullmatch(path.name):
                yield self._one(path, TEMPORARY, _RUNS if _is_locked(path) else "")
            elif path.suffix == ".json":
                yield self._one(path, ACCOUNTS, "the record of jobs and approvals")
            else:
                yield self._other(path)

    def _prepared(self) -> Iterator[Leftover]:
        cache = self.settings.cache
        if cache is None:
            return
        for path in _entries(cache):
            known = path.is_dir() and (_PREPARED.fullmatch(path.name) or path.name.startswith("."))
            needed = self._running_here() if known else "not ours"
            yield self._one(path, PREPARED, needed, read=True)

    def _temporary(self) -> Iterator[Leftover]:
        for path in sorted(Path(tempfile.gettempdir()).glob(_TEMPORARY)):
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    used = "" if not self._others_run(path) else "a process that may use it is running"
                    yield self._one(path, TEMPORARY, used, read=True)

    def _other(self, path: Path) -> Leftover:
        if _UNFINISHED.fullmatch(path.name):
            return self._one(path, TEMPORARY, "")
        return self._one(path, OTHER, "not known by its name")

    def _one(self, path: Path, kind: str, needed: str, read: bool = False) -> Leftover:
        size, used = _measure(path, read)
        if not needed and used > self.before:
            needed = f"used within the last {self.days:g} days"
        return Leftover(path, kind, size, used, needed)

    def _of_job(self, job: str) -> str:
        if self.book is not None and self.book.is_running(job):
            return _RUNS
        return _RUNS if any(job in command for command in self.commands) else ""

    def _with_results(self, path: Path) -> str:
        has = (path / JOB_FOLDER / RESULTS).exists() and not self.results
        return "has results of a run (--results lets them go)" if has else ""

    def _stored(self, path: Path) -> str:
        try:
            status = str(json.loads((path / "meta").read_text(encoding="utf-8"))["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return "its state cannot be read"
        if not status.startswith("FINISHED"):
            return f"the server calls it {status}"
        return self._of_job(path.name) or (
            "" if self.results else "results of a job (--results lets them go)"
        )

    def _busy(self, path: Path) -> str:
        lock = path.with_suffix(".lock")
        if lock.is_file() and _is_locked(lock):
            return _RUNS
        return self._running_here()

    def _running_here(self) -> str:
        # Which run a job works on is in no file: while one runs, nothing goes that it may need.
        return _RUNS if self.running else ""

    def _runs(self) -> bool:
        if self.book is not None:
            jobs = {job for entry in self.book.entries() for job in entry.runs}
            if any(self.book.is_running(job) for job in jobs):
                return True
        here = str(self.kit.path.resolve())
        return any(here in command and _JOB.search(command) for command in self.commands)

    def _others_run(self, path: Path) -> bool:
        """True where a process of ours or of NVFlare is as old as a temporary folder: it may have made it."""
        made = path.stat().st_mtime
        return any(begun <= made for begun in self.commands.values())

    def _state_root(self) -> Path:
        assert self.settings.state is not None  # a kit always has one
        return self.settings.state

    def _storages(self) -> Iterator[tuple[Path, str]]:
        if not self.kit.server:
            return
        resources = self.kit.resources()
        components = [entry for entry in resources.get("components", []) if isinstance(entry, dict)]
        snapshots = ((resources.get("snapshot_persistor") or {}).get("args") or {}).get("storage") or {}
        for component in (*components, snapshots):
            values: dict[str, Any] = component.get("args") or {}
            for key in ("uri_root", "root_dir"):
                folder = Path(str(values.get(key, "")))
                if folder.is_absolute() and folder.is_relative_to(self.kit.path.resolve()):
                    yield folder, key

    def _storage(self, key: str, kind: str, needed: Callable[[Path], str]) -> Iterator[Leftover]:
        for folder, found in self._storages():
            if found == key:
                for path in _entries(folder):
                    known = path.is_dir() and _JOB.fullmatch(path.name)
                    yield self._one(path, kind, needed(path) if known else "not known by its name")


def _commands() -> dict[str, float]:
    """The command lines of processes of NVFlare or ours, each with the time of its beginning."""
    found = {}
    for process in psutil.process_iter(["cmdline", "create_time"]):
        command = " ".join(process.info["cmdline"] or ())
        if process.pid != os.getpid() and ("nvflare" in command or "medfedaug" in command):
            found[command] = process.info["create_time"]
    return found


def _is_locked(path: Path) -> bool:
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _measure(path: Path, read: bool) -> tuple[int, float]:
    """The size of a file or of all files below a folder, and when the last of them was used."""
    files = [path]
    if path.is_dir() and not path.is_symlink():
        files += [Path(root) / name for root, _, names in os.walk(path) for name in names]
    size, used = 0, 0.0
    for file in files:
        with suppress(OSError):
            status = file.lstat()
            size += status.st_size if not file.is_dir() or file.is_symlink() else 0
            used = max(used, status.st_mtime, status.st_atime if read and not file.is_dir() else 0.0)
    return size, used
