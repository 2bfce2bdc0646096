"""Jobs of a kit: at the server from NVFlare's job store, at a site from its processes."""

from pathlib import Path
from typing import NamedTuple

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.apis.storage import StorageException
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage

from medfedaug.federation.job_folder import EVENTS, JOB_FOLDER
from medfedaug.nvflare_jobs.kit.kit import Kit
from medfedaug.nvflare_jobs.kit.watched import has_process


class StoredJob(NamedTuple):
    """A job in the server's store. The status is NVFlare's `RunStatus`."""

    submitted: float
    job: str
    name: str
    status: str


def stored_jobs(kit: Kit) -> list[StoredJob]:
    """Return the jobs in a server's store, the newest last; a site has none."""
    folder, store, found = kit.folders().get("jobs-storage"), FilesystemStorage(), []
    for uri in store.list_objects(str(folder)) if folder is not None and folder.is_dir() else ():
        try:
            meta = store.get_meta(uri)
        except (OSError, ValueError, StorageException):  # it is being written, or was deleted
            continue
        name, status = (str(meta.get(key.value)) for key in (JobMetaKey.JOB_NAME, JobMetaKey.STATUS))
        submitted = float(meta.get(JobMetaKey.SUBMIT_TIME.value) or 0.0)
        found.append(StoredJob(submitted, Path(uri).name, name, status))
    return sorted(found)


def running_jobs(kit: Kit) -> dict[str, str]:
    """Return the running jobs of a kit, and their names, which only the server knows."""
    if kit.server:
        running = (RunStatus.DISPATCHED, RunStatus.RUNNING)
        return {entry.job: entry.name for entry in stored_jobs(kit) if entry.status in running}
    alive = (path for path in kit.path.glob(f"*/{JOB_FOLDER}/{EVENTS}") if has_process(path))
    return {path.parent.parent.name: "" for path in sorted(alive)}
