"""Disk space of a kit: list the leftovers of jobs, and remove those that nothing needs."""

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

import psutil
from filelock import FileLock, Timeout

from medfedaug.errors import ConfigError
from medfedaug.federation.job_folder import JOB_FOLDER, RESULTS
from medfedaug.hospital.privacy import LEDGER_FILE
from medfedaug.hospital.privacy.pseudonyms import PSEUDONYM_KEY
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.kit.kit import Kit

_DAY = 24 * 3600.0
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# State of a run, of an unfinished round, and frozen entries.
_RUN_OF_A_SITE = re.compile(r"[0-9a-f]{32}(\.frozen)?\.pt")
_PREPARED = re.compile(r"[0-9a-f]{32}")
_ROTATED = re.compile(r"(log|error_log|log_fl|audit)\.(txt|json|log)\.\d+")
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}")  # temporary file of `medfedaug.utils.files`
_MARK = re.compile(r"\.[0-9a-f]{16}\.running")
_TEMPORARY = "medfedaug-*"

JOBS, STORE, STATE = "folders of jobs", "job store of the server", "state of runs"
SNAPSHOTS, PREPARED, LOGS = "snapshots of the server", "prepared images", "logs"
TEMPORARY, ACCOUNTS, OTHER = "temporary files", "ledger, keys and book of jobs", "everything else in the kit"
_RUNS = "a job is running here"


@dataclass(frozen=True)
class Leftover:
    """File or folder on the disk, of one of the kinds above.

    ``used`` is the time of the last writing, or reading where known, in seconds since 1970. ``needed`` is the
    reason why it stays; empty where it may go.
    """

    path: Path
    kind: str
    size: int
    used: float
    needed: str


def survey(kit: Kit, days: float, *, results: bool = False) -> list[Leftover]:
    """List the files and folders of a kit, and decide which may go.

    Younger files stay, and so do files that a running job may use, that no later job can replace (the ledger,
    the key of the pseudonyms, the book of jobs with its approvals, settings and certificates), or whose name
    is unknown. Results of finished jobs, which may be the only copy at the server, go only with ``results``.
    """
    return sorted(_Survey(kit, days, results).leftovers(), key=lambda entry: (entry.kind, entry.path))


def remove(leftover: Leftover) -> None:
    """Remove a file or folder that may go; of a link, only the link."""
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
        assert self.settings.state is not None  # a kit always has one
        self.state, root = self.settings.state, kit.path.resolve()
        self.storage = {k: folder for k, folder in kit.folders().items() if folder.is_relative_to(root)}

    def leftovers(self) -> Iterator[Leftover]:
        yield from self._kit()
        yield from self._state()
        yield from self._storage("jobs-storage", STORE, self._stored)
        yield from self._storage("snapshot-storage", SNAPSHOTS, lambda path: self._of_job(path.name))
        yield from self._prepared()
        yield from self._temporary()

    def _kit(self) -> Iterator[Leftover]:
        inside = [self.state, *self.storage.values(), self.settings.cache]
        for path in _entries(self.kit.path):
            if any(folder and folder.is_relative_to(path) for folder in inside):
                continue
            if path.is_dir() and _JOB.fullmatch(path.name):
                yield self._leftover(path, JOBS, self._of_job(path.name) or self._with_results(path))
            elif _ROTATED.fullmatch(path.name):
                yield self._leftover(path, LOGS, "")
            elif path.name.startswith(("log", "error_log", "audit")):
                yield self._leftover(path, LOGS, "it is still written")
            else:
                yield self._leftover(path, OTHER, "certificates, settings and other files")

    def _state(self) -> Iterator[Leftover]:
        for path in _entries(self.state):
            if path.name in (LEDGER_FILE, f"{LEDGER_FILE}-wal", f"{LEDGER_FILE}-shm"):
                yield self._leftover(path, ACCOUNTS, "the account of releases, which limits later ones")
            elif path.is_dir() and not path.is_symlink():
                yield from self._state_of(path)
            else:
                yield self._unknown(path)

    def _state_of(self, folder: Path) -> Iterator[Leftover]:
        """List the folder of the server, or of a site, below the state folder."""
        for path in _entries(folder):
            name = path.name
            if name == PSEUDONYM_KEY:
                yield self._leftover(path, ACCOUNTS, "the key of the pseudonyms")
            elif self.book is not None and path == self.book.folder:
                yield from self._book(path)
            elif path.suffix == ".pt" and (folder.name == "server" or _RUN_OF_A_SITE.fullmatch(name)):
                yield self._leftover(path, STATE, self._busy(path))
            else:
                yield self._unknown(path)

    def _book(self, folder: Path) -> Iterator[Leftover]:
        for path in _entries(folder):
            if _MARK.fullmatch(path.name):
                yield self._leftover(path, TEMPORARY, _RUNS if _is_locked(path) else "")
            elif path.suffix == ".json":
                yield self._leftover(path, ACCOUNTS, "the record of jobs and approvals")
            else:
                yield self._unknown(path)

    def _prepared(self) -> Iterator[Leftover]:
        for path in _entries(self.settings.cache) if self.settings.cache else ():
            known = path.is_dir() and (_PREPARED.fullmatch(path.name) or path.name.startswith("."))
            needed = self._running_here() if known else "not ours"
            yield self._leftover(path, PREPARED, needed, read=True)

    def _temporary(self) -> Iterator[Leftover]:
        for path in sorted(Path(tempfile.gettempdir()).glob(_TEMPORARY)):
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    # A process of ours or of NVFlare that is older than the folder may have made it.
                    used = any(begin <= path.stat().st_mtime for begin in self.commands.values())
                    needed = "a process that may use it is running" if used else ""
                    yield self._leftover(path, TEMPORARY, needed, read=True)

    def _unknown(self, path: Path) -> Leftover:
        if _UNFINISHED.fullmatch(path.name):
            return self._leftover(path, TEMPORARY, "")
        return self._leftover(path, OTHER, "not known by its name")

    def _leftover(self, path: Path, kind: str, needed: str, read: bool = False) -> Leftover:
        size, used = _measure(path, read)
        if not needed and used > self.before:
            needed = f"used within the last {self.days:g} days"
        return Leftover(path, kind, size, used, needed)

    def _of_job(self, job: str) -> str:
        running = self.book is not None and self.book.is_running(job)
        return _RUNS if running or any(job in command for command in self.commands) else ""

    def _with_results(self, path: Path) -> str:
        keep = (path / JOB_FOLDER / RESULTS).exists() and not self.results
        return "has results of a run (--results lets them go)" if keep else ""

    def _stored(self, path: Path) -> str:
        try:
            status = str(json.loads((path / "meta").read_text(encoding="utf-8"))["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return "its state cannot be read"
        if not status.startswith("FINISHED"):
            return f"the server calls it {status}"
        results = "" if self.results else "results of a job (--results lets them go)"
        return self._of_job(path.name) or results

    def _busy(self, path: Path) -> str:
        lock = path.with_suffix(".lock")
        return _RUNS if lock.is_file() and _is_locked(lock) else self._running_here()

    def _running_here(self) -> str:
        # No file says which run a job works on: while a job runs, the state of every run stays.
        return _RUNS if self.running else ""

    def _runs(self) -> bool:
        if self.book is not None:
            jobs = {job for entry in self.book.entries() for job in entry.runs}
            if any(self.book.is_running(job) for job in jobs):
                return True
        kit = str(self.kit.path.resolve())
        return any(kit in command and _JOB.search(command) for command in self.commands)

    def _storage(self, name: str, kind: str, needed: Callable[[Path], str]) -> Iterator[Leftover]:
        for path in _entries(self.storage[name]) if name in self.storage else ():
            known = path.is_dir() and _JOB.fullmatch(path.name)
            yield self._leftover(path, kind, needed(path) if known else "not known by its name")


def _commands() -> dict[str, float]:
    """Return the command lines of processes of NVFlare or ours, with their start times."""
    commands = {}
    for process in psutil.process_iter(["cmdline", "create_time"]):
        command = " ".join(process.info["cmdline"] or ())
        if process.pid != os.getpid() and ("nvflare" in command or "medfedaug" in command):
            commands[command] = process.info["create_time"]
    return commands


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
    """Return the size of a file or of all files below a folder, and the time of the last use."""
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
