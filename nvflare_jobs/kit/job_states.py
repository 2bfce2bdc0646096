"""States of a kit's jobs: at the server from NVFlare's job store, at a site from its book and processes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.apis.storage import StorageException
from nvflare.app_common.storages.filesystem_storage import META, FilesystemStorage

from medfedaug.errors import ConfigError, DataError
from medfedaug.federation.job_folder import EVENTS, JOB_FOLDER
from medfedaug.nvflare_jobs.kit.kit import Kit
from medfedaug.nvflare_jobs.kit.watched import Watched, find_events, has_process
from medfedaug.utils.event_text import follow

STATES = ("submitted", "approval", "running", "stalled", "finished", "aborted", "abnormal")
"""States of a job; ``"approval"`` waits for the site's administrator, ``"stalled"`` for a process."""

ACTIVE = ("approval", "running", "stalled")

_TOLD = 86400.0  # seconds for which the end of a job is told
_OF_STORE = {
    RunStatus.SUBMITTED: "submitted",
    RunStatus.APPROVED: "submitted",
    RunStatus.DISPATCHED: "running",
    RunStatus.RUNNING: "running",
    RunStatus.FINISHED_COMPLETED: "finished",
    RunStatus.FINISHED_ABORTED: "aborted",
}
_OF_EVENTS = {"running": "running", "finished": "finished", "ended": "finished"}


@dataclass(frozen=True)
class JobStanding:
    """State of a job; at the server with its name."""

    job: str
    state: str
    name: str = ""


def job_standings(kit: Kit) -> list[JobStanding]:
    """Return the states of a kit's jobs.

    At the server these are the jobs that have not ended, and those that ended within a day; of jobs with one
    name, such as a job and its continuation, only the last. At a site they are the jobs that wait for
    approval, and else the latest job.
    """
    return list(_of_server(kit) if kit.server else _of_site(kit))


def watched_job(kit: Path, job: str = "") -> tuple[str, Watched] | None:
    """Read the events of a job in a kit, by default of the latest; return its identifier and state."""
    path = kit / job / JOB_FOLDER / EVENTS if job else find_events(kit)
    if path is None or not path.is_file():
        return None
    watched = Watched()
    try:
        for event, _ in follow(path):
            watched.take(event)
        watched.look(path)
    except (OSError, DataError):  # `watch` reports the error
        return None
    return path.parent.parent.name, watched


def newest_ended(kit: Kit, job: str) -> JobStanding | None:
    """Return the newest job of a server's store if it has ended and is not the given one.

    The server removes the folder of a finished job, so that only an older one may have events.
    """
    _, uri, status, name = max(_stored(kit), default=(0.0, "", "", ""))
    state = _OF_STORE.get(status, "abnormal")
    if not uri or Path(uri).name == job or state in ("submitted", "running"):
        return None
    return JobStanding(Path(uri).name, state, name)


def _stored(kit: Kit) -> Iterator[tuple[float, str, str, str]]:
    """Yield time of submission, place, status and name of each job in the server's store."""
    folder, store = kit.folders().get("jobs-storage") if kit.server else None, FilesystemStorage()
    if folder is None or not folder.is_dir():
        return
    for uri in store.list_objects(str(folder)):
        try:
            meta = store.get_meta(uri)
        except (OSError, ValueError, StorageException):  # it is being written, or was deleted
            continue
        name, submitted = str(meta.get(JobMetaKey.JOB_NAME.value)), meta.get(JobMetaKey.SUBMIT_TIME.value)
        yield float(submitted or 0.0), uri, str(meta.get(JobMetaKey.STATUS.value)), name


def _of_server(kit: Kit) -> Iterator[JobStanding]:
    latest: dict[str, tuple[float, str, str]] = {}
    for submitted, uri, status, name in _stored(kit):
        latest[name] = max(latest.get(name, (0.0, "", "")), (submitted, uri, status))
    for name, (_, uri, status) in sorted(latest.items()):
        job, state = Path(uri).name, _OF_STORE.get(status, "abnormal")
        if state not in ("submitted", "running") and time.time() - _written(uri) > _TOLD:
            continue
        if (found := watched_job(kit.path, job)) is not None:
            if state == "running" and (found[1].stalled or found[1].state == "dead"):
                state = "stalled"
            elif found[1].state == "failed":
                state = "abnormal"
        yield JobStanding(job, state, name)


def _written(uri: str) -> float:
    return Path(uri, META).stat().st_mtime


def _of_site(kit: Kit) -> Iterator[JobStanding]:
    try:
        waiting = kit.job_book().waiting_jobs()
    except ConfigError:  # `medfedaug site jobs` reports it
        waiting = set()
    # A job that ended while it waited has no process.
    alive = {
        path.parent.parent.name for path in kit.path.glob(f"*/{JOB_FOLDER}/{EVENTS}") if has_process(path)
    }
    for job in sorted(waiting & alive):
        yield JobStanding(job, "approval")
    found = watched_job(kit.path)
    if found is None or found[0] in waiting & alive:
        return
    job, watched = found
    yield JobStanding(job, "stalled" if watched.stalled else _OF_EVENTS.get(watched.state, "abnormal"))
