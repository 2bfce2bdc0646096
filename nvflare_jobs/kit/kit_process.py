"""The process of a kit: its record, and what it read at its start."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import psutil

from medfedaug._version import __version__
from medfedaug.utils.files import parse_versioned, write_versioned
from medfedaug.utils.printable import printable

PARENTS = ("nvflare.private.fed.app.client.client_train", "nvflare.private.fed.app.server.server_train")
"""Modules that the process of a site's and of the server's kit runs."""

SILENT = 300.0
"""Seconds without an answer of the server after which a site counts as cut off."""

_RECORD_FILE = "running.json"
_FORMAT = "running_kit", 1
_FRESH = 150.0  # seconds, five times the period of the record
_LOCAL = ("resources.json", "authorization.json", "privacy.json", "log_config.json")
# NVFlare reads them for every job, not at the start.
_WITH_EACH_JOB = ("class_allow_list", "class_list_enforcement_mode")


@dataclass(frozen=True)
class ProcessRecord:
    """Record that a kit's process writes of itself. Times are in seconds since 1970.

    Args:
        pid: the process's number, in its container if it has one.
        started: the start of the process.
        settings: the files and versions that the process read at its start.
        written: the time of the record.
        stopping: whether the process was asked to end.
        heard: at a site, the server's last answer.
        namespace: the namespace of ``pid``; each container has its own.
    """

    pid: int
    started: float
    settings: dict[str, str] = field(default_factory=dict)
    written: float = 0.0
    stopping: bool = False
    heard: float | None = None
    namespace: str = ""

    def save(self, kit: Path) -> None:
        """Write the record, only for the kit's owner."""
        write_versioned(kit / _RECORD_FILE, *_FORMAT, asdict(self), private=True)

    @classmethod
    def load(cls, kit: str | Path) -> ProcessRecord | None:
        """Return the last record of a kit; ``None`` where none can be read."""
        try:
            content = parse_versioned((Path(kit) / _RECORD_FILE).read_text(), *_FORMAT)
            return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError):
            return None

    def is_alive(self) -> bool:
        """Return whether its process runs: it wrote lately, and exists if its namespace is visible here."""
        exists = self.namespace != pid_namespace() or psutil.pid_exists(self.pid)
        return exists and abs(time.time() - self.written) < _FRESH


def pid_namespace() -> str:
    """Return the system's name of this process's namespace; empty where the system has none."""
    link = Path("/proc/self/ns/pid")
    return os.readlink(link) if link.is_symlink() else ""


def find_trouble(kit: str | Path, *, server: bool) -> str:
    """Return the reason why a kit's process cannot work, from its record; empty where it can.

    A process writes its record every half minute.
    """
    record = ProcessRecord.load(kit)
    if record is None or not record.is_alive():
        return (
            "does not run" if find_process(kit) is None else "runs without the components of site configure"
        )
    if record.stopping:
        return "was asked to stop"
    silent = time.time() - (record.heard or record.started)
    if not server and (record.heard is None or silent > SILENT):
        return f"the server has not answered for {silent:.0f} s"
    return ""


def python_trouble() -> str:
    """Return the reason why the ``python3`` that ``start.sh`` runs is not this one's; empty where it is."""
    python = shutil.which("python3")
    if python is None:
        return "no python3 is on the PATH"
    code = "import importlib.metadata, medfedaug._version as ours\n"
    code += "importlib.metadata.version('nvflare'), print(ours.__version__)"
    done = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True)
    if done.returncode:
        return f"{python}, the python3 of the PATH, has no medfedaug, or no nvflare"
    if (found := done.stdout.strip()) != __version__:
        return f"{python}, the python3 of the PATH, has medfedaug {printable(found)}; here is {__version__}"
    return ""


def settings_at_start(kit: str | Path) -> dict[str, str]:
    """Return versions, and digests of the files that a kit's process reads only at its start."""
    kit = Path(kit)
    settings = {"medfedaug": __version__, "nvflare": metadata.version("nvflare")}
    for path in (kit / "local" / name for name in _LOCAL):
        settings[f"local/{path.name}"] = _digest(path if path.exists() else Path(f"{path}.default"))
    for path in sorted((kit / "startup").glob("*")):
        if path.suffix in (".crt", ".key", ".pem", ".json"):
            settings[f"startup/{path.name}"] = _digest(path)
    return settings


def changes_at_restart(running: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the files and versions that a restart would change.

    Example:
        >>> changes_at_restart({"nvflare": "2.9.0"}, {"nvflare": "2.9.1"})
        ['nvflare']
    """
    return [name for name in {**running, **now} if running.get(name) != now.get(name)]


def _digest(path: Path) -> str:
    content = path.read_bytes() if path.is_file() else b""
    with suppress(ValueError, AttributeError):
        entries = json.loads(content).items()
        content = json.dumps([entry for entry in entries if entry[0] not in _WITH_EACH_JOB]).encode()
    return hashlib.sha256(content).hexdigest()


def find_process(kit: str | Path) -> psutil.Process | None:
    """Return the process of a kit on this machine, outside of other containers."""
    kit = Path(kit).resolve()
    for process in psutil.process_iter():
        command = command_line(process)
        # `python3 -m MODULE -m KIT`
        options = [value for option, value in pairwise(command) if option == "-m"]
        if options and any(module in command for module in PARENTS) and Path(options[-1]).resolve() == kit:
            return process
    return None


def command_line(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty where it has ended or is not visible."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else list(process.cmdline())
    except psutil.Error:
        return []
