"""Jobs of a kit: at the server from NVFlare's job store, at a site from its processes and its book.

Their states, and those of the kit itself, are metrics for Prometheus. None is about a case.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.apis.storage import StorageException
from nvflare.app_common.storages.filesystem_storage import META, FilesystemStorage

from medfedaug.errors import ConfigError, DataError
from medfedaug.federation.job_folder import ALIVE, EVENTS, JOB_FOLDER, PULSE, SESSION
from medfedaug.nvflare_jobs.kit.kit import Kit
from medfedaug.nvflare_jobs.kit.kit_process import ProcessRecord, find_process
from medfedaug.utils import prometheus
from medfedaug.utils.event_text import EventLines, follow
from medfedaug.utils.validation import is_number

_DEAD_AFTER = 6 * PULSE
_DEAD = (
    "the process of the job is gone, and NVFlare cannot continue the job: the lead submits it again with "
    "--resume, and it continues from its last round"
)


def find_events(folder: str | Path) -> Path | None:
    """Return the events of the latest job below a kit, or of a job's folder, if any."""
    folder = Path(folder)
    patterns = (EVENTS, f"{JOB_FOLDER}/{EVENTS}", f"*/{JOB_FOLDER}/{EVENTS}")
    paths = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)


def has_process(events: Path) -> bool | None:
    """Return whether the process of a job is alive, by a file that it touches; ``None`` without the file."""
    alive = events.with_name(ALIVE)
    return time.time() - alive.stat().st_mtime < _DEAD_AFTER if alive.exists() else None


@dataclass
class Watched:
    """State of a run from its events, at the server or at a site."""

    rounds: int = 0
    round: int = 0
    metric: str = ""
    # The training loss by site and round, of sites that send one.
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    tested: dict[str, dict[str, float]] = field(default_factory=dict)  # the test scores of each site
    waiting: tuple[str, ...] = ()  # silent sites that the job needs to continue
    # "running", "finished" or "failed"; at a site "ended" without a test; "dead" if its process is gone and
    # does not come back.
    state: str = "running"
    approval: bool = False  # whether the job waits for the approval of the site's administrator
    stalled: str = ""  # the reason why a running job does not continue, if any
    refusals: int = 0  # updates that the server refused; at a site, requests that it did not answer
    lines: list[str] = field(default_factory=list)
    _teller: EventLines = field(default_factory=EventLines)

    def take(self, event: Mapping[str, Any]) -> list[str]:
        """Process an event; return its lines."""
        lines = self._teller.lines(event)
        self.lines += lines
        if self.state == "ended":  # the process of the site came back
            self.state = "running"
        self.round, self.rounds = self._teller.round, self._teller.rounds
        kind = event["event"]
        self.waiting = tuple(event["sites"]) if kind == "waiting" else () if kind != "away" else self.waiting
        self.refusals += kind in ("refused", "not_answered")
        if kind == "trained" and is_number(event.get("train_loss")):
            self.losses.setdefault(event["site"], {})[event["round"]] = event["train_loss"]
        elif kind == "answered" and event["task"] == "train":
            self._of_this_site(event)
        elif kind == "round_finished":
            self.seconds[event["round"]] = event["seconds"]
        elif kind == "validated":
            for name, value in event.items():
                if name.startswith("val_"):
                    self.metric, self.scores[event["round"]] = name.removeprefix("val_"), value
        elif kind == "tested":
            scores = {k: v for k, v in event.items() if k not in ("event", "site") and is_number(v)}
            self.tested[event["site"]] = scores
        elif kind in ("finished", "failed") or (kind == "ended" and self.state == "running"):
            self.state = kind
        elif kind == "answered" and event["task"] == "test":  # the last request to a site
            self.tested["this site"] = dict(event["scores"])
            self.state = "finished"
        return lines

    def look(self, events: Path) -> None:
        """Check that a running job continues."""
        if self.state != "running":
            return
        self.stalled = f"waiting for {', '.join(self.waiting)}" if self.waiting else ""
        if has_process(events) is False:
            if events.with_name(SESSION).exists():
                self.stalled = "no process of the job runs here; startup/start.sh brings back the site"
            else:
                self.state = "dead"
                self.lines.append(_DEAD)

    def _of_this_site(self, event: Mapping[str, Any]) -> None:
        self.seconds[event["round"]] = event["seconds"]
        for name, value in event["scores"].items():
            if name == "train_loss":
                self.losses.setdefault("this site", {})[event["round"]] = value
            elif name.startswith("val_"):  # of the previous round's model
                self.metric, self.scores[event["round"] - 1] = name.removeprefix("val_"), value

    @property
    def standing(self) -> str:
        """The state in words."""
        if self.state == "running" and self.approval:
            return "waits for approval: medfedaug site jobs shows it, medfedaug site approve lets it begin"
        return f"stalled: {self.stalled}" if self.state == "running" and self.stalled else self.state

    def over_rounds(self, values: Mapping[int, float]) -> list[float | None]:
        """Return the values of each round so far."""
        return [values.get(number) for number in range(1, max(self.round, *values, 1) + 1)]


STATES = ("submitted", "approval", "running", "stalled", "finished", "aborted", "abnormal")
"""States of a job. ``"approval"`` waits for the site's administrator, ``"stalled"`` for a process."""

_REPORTED = 86400.0  # seconds for which the end of a job is a state
_OF_STORE = {
    RunStatus.SUBMITTED: "submitted",
    RunStatus.APPROVED: "submitted",
    RunStatus.DISPATCHED: "running",
    RunStatus.RUNNING: "running",
    RunStatus.FINISHED_COMPLETED: "finished",
    RunStatus.FINISHED_ABORTED: "aborted",
}
_OF_EVENTS = {"running": "running", "finished": "finished", "ended": "finished"}


class StoredJob(NamedTuple):
    """A job in the server's store. The status is NVFlare's `RunStatus`; it changed at ``changed``."""

    submitted: float
    job: str
    name: str
    status: str
    changed: float


def stored_jobs(kit: Kit) -> list[StoredJob]:
    """Return the jobs in a server's store, the newest last; a site has none."""
    folder, store, found = kit.folders().get("jobs-storage"), FilesystemStorage(), []
    for uri in store.list_objects(str(folder)) if folder is not None and folder.is_dir() else ():
        with suppress(OSError, ValueError, StorageException):  # it is being written, or was deleted
            meta, changed = store.get_meta(uri), Path(uri, META).stat().st_mtime
            name, status = (str(meta.get(key.value)) for key in (JobMetaKey.JOB_NAME, JobMetaKey.STATUS))
            submitted = float(meta.get(JobMetaKey.SUBMIT_TIME.value) or 0.0)
            found.append(StoredJob(submitted, Path(uri).name, name, status, changed))
    return sorted(found)


def running_jobs(kit: Kit) -> dict[str, str]:
    """Return the running jobs of a kit, and their names, which only the server knows."""
    if kit.server:
        running = (RunStatus.DISPATCHED, RunStatus.RUNNING)
        return {entry.job: entry.name for entry in stored_jobs(kit) if entry.status in running}
    alive = (path for path in kit.path.glob(f"*/{JOB_FOLDER}/{EVENTS}") if has_process(path))
    return {path.parent.parent.name: "" for path in sorted(alive)}


def watched_job(kit: Path, job: str = "") -> tuple[str, Watched] | None:
    """Return identifier and events of a job, by default of the latest; ``None`` where none can be read."""
    events = kit / job / JOB_FOLDER / EVENTS if job else find_events(kit)
    if events is None or not events.is_file():
        return None
    watched = Watched()
    with suppress(OSError, DataError):  # `watch` reports the error
        for event, _ in follow(events):
            watched.take(event)
        watched.look(events)
        return events.parent.parent.name, watched
    return None


def job_states(kit: Kit) -> dict[str, str]:
    """Return the state of each job of a kit, one of `STATES`, by its identifier.

    A server has the newest job of each name, so that a continuation stands for the job that it continues; an
    end counts for a day. A site has the jobs that wait for approval, and else its latest job.
    """
    return _of_server(kit) if kit.server else _of_site(kit)


def _of_server(kit: Kit) -> dict[str, str]:
    states = {}
    for entry in {entry.name: entry for entry in stored_jobs(kit)}.values():
        state = _OF_STORE.get(entry.status, "abnormal")
        if state not in ("submitted", "running") and time.time() - entry.changed > _REPORTED:
            continue
        if (found := watched_job(kit.path, entry.job)) is not None:
            if state == "running" and (found[1].stalled or found[1].state == "dead"):
                state = "stalled"
            elif found[1].state == "failed":
                state = "abnormal"
        states[entry.job] = state
    return states


def _of_site(kit: Kit) -> dict[str, str]:
    waiting: set[str] = set()
    with suppress(ConfigError):  # `medfedaug site jobs` reports it
        # A job that ended while it waited has no process.
        waiting = kit.job_book().waiting_jobs() & running_jobs(kit).keys()
    states = dict.fromkeys(sorted(waiting), "approval")
    if (found := watched_job(kit.path)) is not None:
        job, watched = found
        states.setdefault(job, "stalled" if watched.stalled else _OF_EVENTS.get(watched.state, "abnormal"))
    return states


METRICS = {
    "kit_up": "1 while the process of the kit runs.",
    "kit_disk_free_bytes": "Free space where the kit is.",
    "server_heard_timestamp_seconds": "Last answer of the server to this site.",
    "job_state": "1 for the state of a job.",
    "job_refusals_total": "Refused updates of the latest job at a server; refused requests at a site.",
    "written_timestamp_seconds": "Time of writing of these numbers.",
}
"""The metrics, without their prefix, and what each is."""


def _samples(kit: Kit) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Yield name, value and labels of each number, the numbers of a metric together."""
    record = ProcessRecord.load(kit.path)
    alive = find_process(kit.path) is not None or (record is not None and record.is_alive())
    yield "kit_up", alive, {}
    yield "kit_disk_free_bytes", shutil.disk_usage(kit.path).free, {}
    if record is not None and record.heard is not None:
        yield "server_heard_timestamp_seconds", record.heard, {}
    for job, found in job_states(kit).items():
        for state in STATES:
            yield "job_state", state == found, {"job": job, "state": state}
    if (latest := watched_job(kit.path)) is not None:
        yield "job_refusals_total", latest[1].refusals, {"job": latest[0]}
    yield "written_timestamp_seconds", time.time(), {}


def write_metrics(kit: Kit, path: str | Path) -> None:
    """Write a kit's numbers to a file."""
    samples = ((name, value, {"kit": kit.name, **labels}) for name, value, labels in _samples(kit))
    prometheus.write_metrics(path, METRICS, samples)
