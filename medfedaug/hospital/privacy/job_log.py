"""`JobBook`: the jobs that came to a site, their submitters, and the administrator's decisions."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import RunConfig, job_hash
from medfedaug.errors import ConfigError
from medfedaug.utils.files import parse_versioned, private_folder, remove_unfinished, write_versioned

WAITING, APPROVED, REFUSED = "waiting", "approved", "refused"

JOBS_FOLDER = "jobs"
"""Folder of a site's job book, below its state folder."""

_KIND, _VERSION = "job", 1


@dataclass(frozen=True)
class Origin:
    """Origin of a job, as far as the site can know.

    ``signed`` means that the submitter's certificate of the project has signed the job's content; otherwise
    the server names the submitter. ``asked`` is the time of the first request, in seconds since 1970.
    """

    name: str = ""
    submitter: str = ""
    organisation: str = ""
    role: str = ""
    signed: bool = False
    asked: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Decision of the site's administrator, ``"approved"`` or ``"refused"``, with its time."""

    verdict: str
    by: str
    when: float


@dataclass(frozen=True)
class JobEntry:
    """Configuration of jobs at a site, with its ``verdict``: ``"waiting"``, ``"approved"`` or ``"refused"``.

    ``runs``, ``ends`` and ``origins`` have the starts, the reported ends and the origins of its jobs, by the
    jobs' identifiers. ``seen`` is its first arrival, and ``decisions`` begins with the oldest. Times are in
    seconds since 1970.
    """

    hash: str
    config: dict[str, Any]
    seen: float
    verdict: str
    runs: dict[str, float]
    ends: dict[str, float] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()

    @property
    def compares(self) -> bool:
        """Return whether the configuration is of a comparison."""
        return "run" in self.config

    @property
    def run(self) -> dict[str, Any]:
        """The settings of a run; in a comparison those of all trainings, except for methods and seed."""
        return self.config["run"] if self.compares else self.config

    @property
    def methods(self) -> list[str]:
        """The names of the methods; in a comparison those of its trainings."""
        if self.compares:
            return list(self.config["methods"])
        return [method["name"] for method in self.config["methods"]]


class JobBook:
    """Record of the configurations that came to a site, one file each, in a new or existing folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def entries(self) -> list[JobEntry]:
        """List all entries, the oldest first."""
        entries = [self._read(path) for path in sorted(self.folder.glob("*.json"))]
        return sorted(entries, key=lambda entry: entry.seen)

    def waiting_jobs(self) -> set[str]:
        """Return the identifiers of the jobs that wait for approval."""
        entries = self.entries()
        waiting = {job for entry in entries if entry.verdict == WAITING for job in entry.origins}
        return waiting - {job for entry in entries for job in entry.runs}

    def note(
        self, config: RunConfig | ComparisonConfig, job: str = "", origin: Origin | None = None
    ) -> JobEntry:
        """Return the entry of a configuration, and make it if it is new; note the origin of its job."""
        values = config.to_dict()
        digest = job_hash(values)
        with self._locked():
            path = self._path(digest)
            if not path.exists():
                self._write(JobEntry(digest, values, time.time(), WAITING, {}))
            entry = self._read(path)
            if origin is not None and job not in entry.origins:
                origins = {**entry.origins, job: replace(origin, asked=time.time())}
                entry = replace(entry, origins=origins)
                self._write(entry)
            return entry

    def begin(self, config: RunConfig | ComparisonConfig, job: str) -> None:
        """Enter the start of a job with a configuration; a job that was started again counts once."""
        entry = self.note(config)
        with self._locked():
            entry = self._read(self._path(entry.hash))
            ends = {name: when for name, when in entry.ends.items() if name != job}  # it came back
            self._write(replace(entry, runs={job: time.time(), **entry.runs}, ends=ends))

    def end(self, job: str) -> None:
        """Enter the end of a job at this site."""
        with self._locked():
            for entry in self.entries():
                if job in entry.runs:
                    self._write(replace(entry, ends={**entry.ends, job: time.time()}))

    def find(self, beginning: str) -> JobEntry:
        """Return the entry whose hash has this beginning."""
        entries = self.entries()
        matches = [entry for entry in entries if beginning and entry.hash.startswith(beginning)]
        if len(matches) != 1:
            known = ", ".join(entry.hash[:12] for entry in entries) or "none"
            text = f"{len(matches)} jobs have a hash that begins with {beginning!r}; known: {known}"
            raise ConfigError(text)
        return matches[0]

    def judge(self, beginning: str, verdict: str, by: str = "") -> JobEntry:
        """Enter a decision, ``"approved"`` or ``"refused"``, about the configuration that `find` returns."""
        with self._locked():
            entry = self.find(beginning)
            decisions = (*entry.decisions, Decision(verdict, by, time.time()))
            entry = replace(entry, verdict=verdict, decisions=decisions)
            self._write(entry)
        return entry

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"

    def _read(self, path: Path) -> JobEntry:
        try:
            values = parse_versioned(path.read_text(encoding="utf-8"), _KIND, _VERSION)
            entry = JobEntry(
                path.stem,
                config=values["config"],
                seen=values["seen"],
                verdict=values["verdict"],
                runs=values["runs"],
                ends=values["ends"],
                origins={job: Origin(**entry) for job, entry in values["origins"].items()},
                decisions=tuple(Decision(**entry) for entry in values["decisions"]),
            )
            # The approval is for the hash in the file's name.
            if job_hash(entry.config) != entry.hash:
                raise ValueError("its content does not match its name")
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
