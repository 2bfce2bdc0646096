"""Numbers of a kit for monitoring: process, certificate, disk, connection, and the latest job.

Prometheus' node_exporter reads their text format with its textfile collector. No number is about a case, and
no label names one.
"""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from medfedaug._version import __version__
from medfedaug.nvflare_jobs.kit.job_states import STATES, job_standings, watched_job
from medfedaug.nvflare_jobs.kit.kit import Kit
from medfedaug.nvflare_jobs.kit.kit_process import (
    ProcessRecord,
    changes_at_restart,
    find_process,
    settings_at_start,
)
from medfedaug.nvflare_jobs.kit.startup import certificate_ends
from medfedaug.utils.files import write_text

_HELP = {
    "kit_info": "Versions of the software of a kit.",
    "kit_up": "1 while the process of the kit runs.",
    "kit_started_timestamp_seconds": "Start of the process of the kit.",
    "kit_restart_needed": "1 while the process runs with other files than those of the kit.",
    "kit_disk_free_bytes": "Free space where the kit is.",
    "certificate_expiry_timestamp_seconds": "End of a certificate of the kit.",
    "server_heard_timestamp_seconds": "Last answer of the server to this site.",
    "site_heard_timestamp_seconds": "Last heartbeat of a site at this server.",
    "job_state": "1 for the state of a job.",
    "job_round": "Round of the latest job.",
    "job_rounds": "Number of rounds of the latest job.",
    "job_round_seconds": "Duration of the last finished round of the latest job.",
    "job_refusals_total": "Refused updates of the latest job at a server; refused requests at a site.",
    "written_timestamp_seconds": "Time of writing of these numbers.",
}


@dataclass(frozen=True)
class Sample:
    """One number of a metric, whose name has no prefix; the kit's name is a further label."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def kit_metrics(kit: Kit) -> list[Sample]:
    """Collect the current numbers of a kit."""
    return [*_process(kit), *_job(kit), Sample("written_timestamp_seconds", time.time())]


def _process(kit: Kit) -> Iterator[Sample]:
    versions = (("version", __version__), ("nvflare", metadata.version("nvflare")))
    yield Sample("kit_info", 1, (("role", "server" if kit.server else "site"), *versions))
    process, record = find_process(kit.path), ProcessRecord.load(kit.path)
    runs = process is not None or (record is not None and record.is_alive() and not record.stopping)
    yield Sample("kit_up", runs)
    yield Sample("kit_disk_free_bytes", shutil.disk_usage(kit.path).free)
    for file, end in certificate_ends(kit.path).items():
        yield Sample("certificate_expiry_timestamp_seconds", end.timestamp(), (("file", file),))
    if record is not None and process is not None and process.pid != record.pid:
        record = None
    if runs:
        stale = record is None or bool(changes_at_restart(record.settings, settings_at_start(kit.path)))
        yield Sample("kit_restart_needed", stale)
    if record is None:
        return
    yield Sample("kit_started_timestamp_seconds", record.started)
    if record.heard is not None:
        yield Sample("server_heard_timestamp_seconds", record.heard)
    for site, heard in sorted(record.sites.items()):
        yield Sample("site_heard_timestamp_seconds", heard, (("site", site),))


def _job(kit: Kit) -> Iterator[Sample]:
    """Collect the states of jobs, and numbers of the latest one from its events."""
    for standing in job_standings(kit):
        for state in STATES:
            labels = (("job", standing.job), ("state", state))
            yield Sample("job_state", state == standing.state, labels)
    found = watched_job(kit.path)
    if found is None:
        return
    job, watched = (("job", found[0]),), found[1]
    yield Sample("job_round", watched.round, job)
    yield Sample("job_rounds", watched.rounds, job)
    if watched.seconds:
        yield Sample("job_round_seconds", watched.seconds[max(watched.seconds)], job)
    yield Sample("job_refusals_total", watched.refusals, job)


def exposition(samples: Iterable[Sample], kit: str) -> str:
    """Format numbers as Prometheus' text.

    Example:
        >>> print(exposition([Sample("kit_up", True)], "hospital-a"), end="")
        # HELP medfedaug_kit_up 1 while the process of the kit runs.
        # TYPE medfedaug_kit_up gauge
        medfedaug_kit_up{kit="hospital-a"} 1
    """
    lines, last = [], ""
    for sample in samples:
        name = f"medfedaug_{sample.name}"
        if name != last:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {_HELP[sample.name]}", f"# TYPE {name} {kind}"]
            last = name
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in (("kit", kit), *sample.labels))
        value = float(sample.value)
        lines.append(f"{name}{{{labels}}} {value:.15g}" if math.isfinite(value) else f"# {name} is not known")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write_metrics(kit: Kit, path: str | Path) -> None:
    """Write the numbers of a kit to a file, which is always whole for a reader."""
    write_text(path, exposition(kit_metrics(kit), kit.name))
    with contextlib.suppress(OSError):  # a collector is another user, and the file has no secret
        os.chmod(path, 0o644)
