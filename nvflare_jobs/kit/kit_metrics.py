"""Numbers of a kit for Prometheus: its process, disk, connection and jobs. None is about a case."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from medfedaug.nvflare_jobs.kit.job_states import STATES, job_states, watched_job
from medfedaug.nvflare_jobs.kit.kit import Kit
from medfedaug.nvflare_jobs.kit.kit_process import ProcessRecord, find_process
from medfedaug.utils import prometheus

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
