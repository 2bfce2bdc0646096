"""The process of a kit: its record, and what it read at its start.

NVFlare reads most of a kit's files once, when the process starts. `settings_at_start` is their current
content, and the process records the content at its start: a restart changes the difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import psutil
from annotated_types import Ge, Le
from pydantic import StringConstraints, TypeAdapter

from medfedaug._version import __version__
from medfedaug.utils.files import parse_json, parse_versioned, write_versioned
from medfedaug.utils.printable import printable

PARENTS = ("nvflare.private.fed.app.client.client_train", "nvflare.private.fed.app.server.server_train")
"""Modules that the process of a site's and of the server's kit runs."""

RECORD_FILE = "running.json"
"""The record's file in the kit."""

RECENT = 600.0
"""Seconds within which repeated starts are a loop."""

LATEST = 253_402_300_799.0
"""End of the year 9999, the latest time of a record."""

_FORMAT = "running_kit", 1
_SILENT = 300.0  # seconds without an answer of the server after which a site counts as cut off
_FRESH = 150.0  # seconds, five times the period of the record
_LOCAL = ("resources.json", "authorization.json", "privacy.json", "log_config.json")
_BY_DIGEST = ("privacy.json", "log_config.json")
# NVFlare reads them for every job, not at the start.
_WITH_EACH_JOB = ("class_allow_list", "class_list_enforcement_mode")
_LONGEST = 70
_PYTHON = 30.0  # seconds

_Time = Annotated[float, Ge(0), Le(LATEST)]
# A server sends it, and a person may type it into a command.
_VERSION = r"[0-9][0-9A-Za-z.+!]{0,39}"
_Version = Annotated[str, StringConstraints(pattern=rf"^({_VERSION})?$")]


@dataclass(frozen=True)
class ProcessRecord:
    """Record that a kit's process writes of itself. Times are in seconds since 1970.

    Args:
        pid: the process's number, in its container if it has one.
        started: the start of the process.
        starts: the starts of the last minutes, this one included.
        written: the time of the record.
        stopping: whether the process was asked to end.
        heard: at a site, the server's last answer.
        clock: at a site, the server's clock minus this machine's, in seconds.
        server_version: at a site, the version of medfedaug at the server.
        sites: at the server, the last message of each site.
        namespace: the namespace of ``pid``; each container has its own.
    """

    pid: Annotated[int, Ge(1), Le(2**31 - 1)]
    started: _Time
    starts: list[_Time] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    written: _Time = 0.0
    stopping: bool = False
    heard: _Time | None = None
    clock: Annotated[float, Ge(-1e12), Le(1e12)] | None = None
    server_version: _Version = ""
    sites: dict[str, _Time] = field(default_factory=dict)
    namespace: str = ""

    def save(self, kit: Path) -> None:
        """Write the record, for the kit's owner alone."""
        write_versioned(kit / RECORD_FILE, *_FORMAT, asdict(self), private=True)

    @classmethod
    def load(cls, kit: str | Path) -> ProcessRecord | None:
        """Return the last record of a kit; ``None`` where none can be read."""
        try:
            content = parse_versioned((Path(kit) / RECORD_FILE).read_text(), *_FORMAT)
            return _RECORD.validate_python({field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError):  # pydantic's error is a ValueError
            return None

    @property
    def recent_starts(self) -> int:
        """Number of starts in the last minutes; all but the first are restarts after a crash."""
        return len(self.starts) if self.starts and time.time() - self.starts[-1] < RECENT else 1

    def is_alive(self) -> bool:
        """Return whether its process runs: it wrote lately, and exists if its namespace is visible here."""
        exists = self.namespace != pid_namespace() or psutil.pid_exists(self.pid)
        return exists and abs(time.time() - self.written) < _FRESH


_RECORD = TypeAdapter(ProcessRecord)


def pid_namespace() -> str:
    """Return the system's name of this process's namespace; empty where the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_version(text: str) -> bool:
    """Return whether a text can be the version of a package.

    Example:
        >>> is_version("0.4.0"), is_version("0.4.0; reboot")
        (True, False)
    """
    return re.fullmatch(_VERSION, text) is not None


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
    if not server and (record.heard is None or silent > _SILENT):
        return f"the server has not answered for {silent:.0f} s"
    return ""


def python_trouble() -> str:
    """Return the reason why the ``python3`` that ``start.sh`` runs is not this one's; empty where it is."""
    python = shutil.which("python3")
    if python is None:
        return "no python3 is on the PATH"
    code = "import importlib.metadata, medfedaug._version as ours\n"
    code += "importlib.metadata.version('nvflare'), print(ours.__version__)"
    try:
        done = subprocess.run(
            [python, "-c", code], cwd="/", capture_output=True, text=True, timeout=_PYTHON, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python}, the python3 of the PATH, cannot be run ({error})"
    if done.returncode:
        return f"{python}, the python3 of the PATH, has no medfedaug, or no nvflare"
    if (found := done.stdout.strip()) != __version__:
        return f"{python}, the python3 of the PATH, has medfedaug {printable(found)}; here is {__version__}"
    return ""


def settings_at_start(kit: str | Path) -> dict[str, str]:
    """Return the content of the files that a kit's process reads only at its start, as short texts."""
    kit = Path(kit)
    settings = {"medfedaug": __version__, "nvflare": metadata.version("nvflare")}
    for name in _LOCAL:
        content = _in_force(kit / "local" / name)
        if name in _BY_DIGEST and content:
            content = _digest(json.dumps(content, sort_keys=True).encode())
        settings.update(_entries(f"local/{name}", content))
    for path in sorted((kit / "startup").glob("*")):
        if path.suffix in (".crt", ".key", ".pem", ".json") and path.is_file():  # reading a FIFO would block
            settings[f"startup/{path.name}"] = _digest(_bytes(path))
    return settings


def changes_at_restart(running: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Describe each entry that a restart would change.

    Example:
        >>> changes_at_restart({"nvflare": "2.9.0"}, {"nvflare": "2.9.1"})
        {'nvflare': '2.9.0 runs, 2.9.1 after a restart'}
    """
    return {
        name: f"{running.get(name, 'nothing')} runs, {now.get(name, 'nothing')} after a restart"
        for name in {**running, **now}
        if running.get(name) != now.get(name)
    }


def _in_force(path: Path) -> Any:
    for candidate in (path, path.with_name(f"{path.name}.default")):
        if candidate.is_file():
            try:
                return parse_json(candidate.read_text())
            except (OSError, ValueError):
                return f"not readable, {_digest(_bytes(candidate))}"
    return {}


def _entries(at: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the entries below a value; a component is one entry, its class and its arguments."""
    if isinstance(value, dict) and "path" in value:
        arguments = value.get("args") or {}
        name = str(value["path"]).rsplit(".", 1)[-1]
        yield at, name + (f" {_short(arguments)}" if arguments else "")
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in _WITH_EACH_JOB:
                yield from _entries(f"{at}: {key}" if at.endswith(".json") else f"{at}.{key}", part)
    elif isinstance(value, list) and value and all(isinstance(part, dict) and "id" in part for part in value):
        for part in value:
            yield from _entries(f"{at}.{part['id']}", part)
    else:
        yield at, _short(value)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _LONGEST else _digest(text.encode())


def _digest(content: bytes) -> str:
    return f"SHA-256 {hashlib.sha256(content).hexdigest()[:12]}"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


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
