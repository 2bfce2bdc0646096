"""Disk space of a kit: list the leftovers of jobs, and remove those that nothing needs."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from medfedaug.federation.job_folder import JOB_FOLDER, RESULTS
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.kit.job_states import running_jobs, stored_jobs
from medfedaug.nvflare_jobs.kit.kit import Kit

_DAY = 24 * 3600.0
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_RUN_OF_A_SITE = re.compile(r"[0-9a-f]{32}(\.frozen)?\.pt")  # state of a run, and its frozen entries
_PREPARED = re.compile(r"[0-9a-f]{32}|\..*")

JOBS, STATE, PREPARED = "folders of jobs", "state of runs", "prepared images"
STORES = {"jobs-storage": "job store of the server", "snapshot-storage": "snapshots of the server"}
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
    """List what jobs left in a kit, and decide which may go.

    Younger files stay, and so do files that a running job may use. Results of finished jobs, which may be the
    only copy at the server, go only with ``results``. No other part of a kit is listed.
    """
    found = []
    for path, kind, needed in _leftovers(kit, results):
        size, used = _measure(path, read=kind == PREPARED)
        if not needed and used > time.time() - days * _DAY:
            needed = f"used within the last {days:g} days"
        found.append(Leftover(path, kind, size, used, needed))
    return sorted(found, key=lambda entry: (entry.kind, entry.path))


def remove(leftover: Leftover) -> None:
    """Remove a file or folder that may go; of a link, only the link."""
    if leftover.path.is_dir() and not leftover.path.is_symlink():
        shutil.rmtree(leftover.path)
    else:
        leftover.path.unlink(missing_ok=True)


def _leftovers(kit: Kit, results: bool) -> Iterator[tuple[Path, str, str]]:
    """Yield path, kind, and the reason why it stays, if any, whatever its age."""
    settings, root, commands = SiteSettings.load(kit.path), kit.path.resolve(), _commands()
    finished = {entry.job for entry in stored_jobs(kit) if entry.status.startswith("FINISHED")}
    alive = running_jobs(kit)
    kept = "" if results else "results of a job (--results lets them go)"
    # No file says which run a job works on: while a job runs, the state of every run stays.
    running = any(str(root) in command and _JOB.search(command) for command in commands)
    busy = _RUNS if running or alive else ""

    def of_job(job: str) -> str:
        return _RUNS if job in alive or any(job in command for command in commands) else ""

    for path in _folders(kit.path):
        if _JOB.fullmatch(path.name):
            has_results = (path / JOB_FOLDER / RESULTS).exists()
            yield path, JOBS, of_job(path.name) or (kept if has_results else "")
    assert settings.state is not None  # a kit always has one
    for path in settings.state.glob("*/*.pt"):
        if path.parent.name == "server" or _RUN_OF_A_SITE.fullmatch(path.name):
            yield path, STATE, busy
    for name, folder in kit.folders().items():
        for path in _folders(folder) if folder.is_relative_to(root) else ():
            if _JOB.fullmatch(path.name):
                stored = kept if path.name in finished else "the server has not finished it"
                yield path, STORES[name], of_job(path.name) or (stored if name == "jobs-storage" else "")
    for path in _folders(settings.cache) if settings.cache else ():
        if _PREPARED.fullmatch(path.name):
            yield path, PREPARED, busy


def _commands() -> list[str]:
    """Return the command lines of processes of NVFlare or ours."""
    others = [process for process in psutil.process_iter(["cmdline"]) if process.pid != os.getpid()]
    commands = [" ".join(process.info["cmdline"] or ()) for process in others]
    return [command for command in commands if "nvflare" in command or "medfedaug" in command]


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


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
