"""`JobBook`: the jobs that a site has seen, who submitted them, and the administrator's decisions."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, JobRefused
from medfedaug.utils.files import parse_versioned, private_folder, remove_unfinished, write_versioned

__all__ = [
    "APPROVED",
    "JOBS_FOLDER",
    "REFUSED",
    "WAITING",
    "Decision",
    "JobBook",
    "JobEntry",
    "Origin",
    "job_hash",
]

WAITING, APPROVED, REFUSED = "waiting", "approved", "refused"

JOBS_FOLDER = "jobs"
"""Folder of a site's job book, below its state folder."""

_KIND, _VERSION = "job", 1
_DAY = 24 * 3600.0


def job_hash(config: Mapping[str, Any]) -> str:
    """The SHA-256 of a job's configuration: all that decides over what it computes at a site.

    Args:
        config: `RunConfig.to_dict`.
    """
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Origin:
    """Origin of a job, as far as the site can know.

    Args:
        name: the job's name, as the server says.
        submitter: who submitted it.
        organisation: the submitter's.
        role: the submitter's, in the project.
        signed: whether a certificate of the project that names the submitter has signed the job's content.
            Otherwise the server says who submitted it.
        asked: when the job asked first, in seconds since 1970.
    """

    name: str = ""
    submitter: str = ""
    organisation: str = ""
    role: str = ""
    signed: bool = False
    asked: float = 0.0


@dataclass(frozen=True)
class Decision:
    """A decision of the site's administrator.

    Args:
        verdict: ``"approved"`` or ``"refused"``.
        by: who decided.
        when: in seconds since 1970.
    """

    verdict: str
    by: str
    when: float


@dataclass(frozen=True)
class JobEntry:
    """A configuration that jobs have brought to a site.

    Args:
        hash: of the configuration.
        config: the configuration.
        seen: when it came first, in seconds since 1970.
        verdict: ``"waiting"``, ``"approved"`` or ``"refused"``.
        runs: when each job with it began, by the job's identifier.
        ends: when each job that has said so ended.
        origins: where each job comes from that asked with it.
        decisions: all decisions about it, the oldest first.
    """

    hash: str
    config: dict[str, Any]
    seen: float
    verdict: str
    runs: dict[str, float]
    ends: dict[str, float] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()


class JobBook:
    """Record of the configurations that a site has seen, one file each.

    Args:
        folder: it need not exist yet.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._held: dict[str, FileLock] = {}  # of the jobs that run in this process

    def entries(self) -> list[JobEntry]:
        """List all entries, the oldest first.

        Raises:
            ConfigError: naming a file that is damaged.
        """
        found = [self._read(path) for path in sorted(self.folder.glob("*.json"))]
        return sorted(found, key=lambda entry: entry.seen)

    def note(self, config: RunConfig, job: str = "", origin: Origin | None = None) -> JobEntry:
        """The entry of a configuration, which is made if it is new.

        Args:
            config: the configuration.
            job: the identifier of the job that brings it.
            origin: where that job comes from.

        Raises:
            ConfigError: when its file is damaged.
            StorageError: when it cannot be written.
        """
        values = config.to_dict()
        found = job_hash(values)
        with self._locked():
            path = self._path(found)
            if not path.exists():
                self._write(JobEntry(found, values, time.time(), WAITING, {}))
            entry = self._read(path)
            if origin is not None and job not in entry.origins:
                asked = replace(origin, asked=time.time())
                entry = replace(entry, origins={**entry.origins, job: asked})
                self._write(entry)
            return entry

    def known(self, found: str) -> JobEntry | None:
        """The entry of a configuration; ``None`` where it was never noted, or is forgotten.

        Args:
            found: of `job_hash`.

        Raises:
            ConfigError: when its file is damaged.
        """
        with self._locked():
            path = self._path(found)
            return self._read(path) if path.exists() else None

    def limit_waiting(self, most: int) -> list[JobEntry]:
        """Forget the oldest configurations that wait for a decision, and with which no job has begun.

        Args:
            most: the number of them that stay.

        Returns:
            Those that are forgotten.

        Raises:
            ConfigError: when a file is damaged.
        """
        with self._locked():
            waiting = [entry for entry in self.entries() if entry.verdict == WAITING and not entry.runs]
            for entry in waiting[:-most]:
                self._path(entry.hash).unlink(missing_ok=True)
        return waiting[:-most]

    def check(self, site: str, config: RunConfig, job: str, most: int) -> None:
        """Check that one more job may begin; see `begin`.

        Raises:
            JobRefused: when there were so many already.
        """
        begun = {(job, other.hash): when for other in self.entries() for job, when in other.runs.items()}
        now = time.time()
        # One dated more than a day in the future does not count: the clock was wrong when it began.
        recent = sum(abs(now - when) < _DAY for when in begun.values())
        if (job, job_hash(config.to_dict())) not in begun and recent >= most:
            reason = f"{most} jobs began in the last 24 hours, and the site's rule max_jobs_per_day is {most}"
            raise JobRefused(site, reason)

    def begin(self, site: str, config: RunConfig, job: str, most: int) -> None:
        """Enter that a job begins with a configuration. One whose process was started again counts once.

        Each configuration counts, under whatever identifier it comes: a job that brings several counts as
        several.

        Args:
            site: its name, for the message.
            config: the job's.
            job: its identifier.
            most: the most jobs that may begin within 24 hours.

        Raises:
            JobRefused: when there were so many already.
        """
        entry = self.note(config)
        with self._locked():
            self.check(site, config, job, most)
            entry = self._read(self._path(entry.hash))
            ends = {name: when for name, when in entry.ends.items() if name != job}  # it came back
            self._write(replace(entry, runs={job: time.time(), **entry.runs}, ends=ends))
        self._hold(job)

    def end(self, job: str) -> None:
        """Enter that a job has ended at this site."""
        with self._locked():
            for entry in self.entries():
                if job in entry.runs:
                    self._write(replace(entry, ends={**entry.ends, job: time.time()}))
        lock = self._held.pop(job, None)
        if lock is not None:
            lock.release()
            self._mark(job).unlink(missing_ok=True)

    def is_running(self, job: str) -> bool:
        """Return whether a process of a job runs on this machine now."""
        mark = self._mark(job)
        if not mark.is_file():
            return False
        try:
            with FileLock(mark, timeout=0):
                return False
        except Timeout:
            return True

    def _hold(self, job: str) -> None:
        """Hold the job's mark, which the system lets go of when this process ends, however it does."""
        if job in self._held:
            return
        lock = FileLock(self._mark(job), timeout=1, thread_local=False)
        with suppress(Timeout):  # another process of the same job, which has not ended yet
            lock.acquire()
            self._held[job] = lock

    def _mark(self, job: str) -> Path:
        # The identifier is the server's, and may be no name of a file.
        return (
            self.folder / f".{hashlib.sha256(job.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}.running"
        )

    def find(self, beginning: str) -> JobEntry:
        """The entry whose hash begins like this.

        Raises:
            ConfigError: when there is none, or more than one.
        """
        found = [entry for entry in self.entries() if beginning and entry.hash.startswith(beginning)]
        if len(found) != 1:
            known = ", ".join(entry.hash[:12] for entry in self.entries()) or "none"
            raise ConfigError(f"{len(found)} jobs have a hash that begins with {beginning!r}; known: {known}")
        return found[0]

    def judge(self, beginning: str, verdict: str, by: str = "") -> JobEntry:
        """Enter a decision of the administrator about a configuration.

        Args:
            beginning: of its hash.
            verdict: ``"approved"`` or ``"refused"``.
            by: who decided.

        Raises:
            ConfigError: see `find`.
        """
        with self._locked():
            entry = self.find(beginning)
            decisions = (*entry.decisions, Decision(verdict, by, time.time()))
            entry = replace(entry, verdict=verdict, decisions=decisions)
            self._write(entry)
        return entry

    def _path(self, found: str) -> Path:
        return self.folder / f"{found}.json"

    def _read(self, path: Path) -> JobEntry:
        try:
            values = parse_versioned(path.read_text(encoding="utf-8"), _KIND, _VERSION)
            entry = JobEntry(
                path.stem,
                config=values["config"],
                seen=values["seen"],
                verdict=values["verdict"],
                runs=values["runs"],
                # Entries of earlier versions have none of these.
                ends=values.get("ends", {}),
                origins={job: Origin(**entry) for job, entry in values.get("origins", {}).items()},
                decisions=tuple(Decision(**entry) for entry in values.get("decisions", ())),
            )
            # The file's name is what was approved, and its content what was read.
            if job_hash(entry.config) != entry.hash:
                raise ValueError("its content is not that of its name")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not an entry of the book of jobs ({error}); remove it") from error
        return entry

    def _write(self, entry: JobEntry) -> None:
        content = {name: value for name, value in asdict(entry).items() if name != "hash"}
        write_versioned(self._path(entry.hash), _KIND, _VERSION, content, private=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        private_folder(self.folder)
        with FileLock(self.folder / ".lock"):
            remove_unfinished(self.folder)
            yield
