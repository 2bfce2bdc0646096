"""The process of a kit: its record, and what it read at its start."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path

import psutil

from medfedaug._version import __version__
from medfedaug.utils.files import parse_versioned, write_versioned
from medfedaug.utils.printable import printable

PARENTS = ("nvflare.private.fed.app.client.client_train", "nvflare.private.fed.app.server.server_train")
"""Modules that the process of a site's and of the server's kit runs."""

SILENT = 300.0  # seconds without an answer of the server after which a site counts as cut off

_RECORD_FILE = "running.json"
_FORMAT = "running_kit", 1
_FRESH = 150.0  # seconds, five times the period of the record
_LOCAL = ("resources.json", "authorization.json", "privacy.json", "log_config.json")
_STARTUP = (".crt", ".key", ".pem", ".json")


@dataclass(frozen=True)
class ProcessRecord:
    """Record that a kit's process writes of itself, also for other containers.

    Times are in seconds since 1970. ``heard`` is the server's last answer to a site.
    """

    pid: int
    started: float
    written: float
    stopping: bool = False
    heard: float | None = None
    software: str = __version__

    def save(self, kit: Path) -> None:
        """Write the record, only for the kit's owner."""
        write_versioned(kit / _RECORD_FILE, *_FORMAT, asdict(self), private=True)

    @classmethod
    def load(cls, kit: str | Path) -> ProcessRecord | None:
        """Return the last record of a kit; ``None`` where none can be read."""
        with suppress(OSError, ValueError, KeyError):
            content = parse_versioned((Path(kit) / _RECORD_FILE).read_text(), *_FORMAT)
            return cls(**{field.name: content[field.name] for field in fields(cls)})
        return None

    def is_alive(self) -> bool:
        """Return whether its process runs: it wrote lately, and was not asked to stop."""
        return not self.stopping and abs(time.time() - self.written) < _FRESH


def find_trouble(kit: str | Path, *, server: bool) -> str:
    """Return the reason why a kit's process cannot work, from its record; empty where it can."""
    record = ProcessRecord.load(kit)
    if record is None or not record.is_alive():
        lacks = "runs without the components of site configure"
        return "does not run" if find_process(kit) is None else lacks
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


def changes_at_restart(kit: Path, record: ProcessRecord) -> list[str]:
    """List what a restart would change: the version, and files that a process reads only at its start."""
    files = [kit / "local" / name for name in _LOCAL]
    files += [path for path in sorted((kit / "startup").iterdir()) if path.suffix in _STARTUP]
    changed = [path for path in files if path.exists() and path.stat().st_mtime > record.started]
    names = [str(path.relative_to(kit)) for path in changed]
    return names if record.software == __version__ else ["medfedaug", *names]


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
    with suppress(psutil.Error):
        return [] if process.status() == psutil.STATUS_ZOMBIE else list(process.cmdline())
    return []
