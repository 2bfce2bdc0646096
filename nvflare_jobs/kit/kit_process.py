"""The process of a kit: the record that it writes of itself, and its start, stop and restart.

NVFlare reads most of a kit's files once, when the process starts. `settings_at_start` is their content as it
is now; the process records the content that it started with, and the difference is what a restart changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
from annotated_types import Ge, Le
from pydantic import StringConstraints, TypeAdapter

from medfedaug._version import __version__
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.utils.files import parse_json, parse_versioned, write_versioned
from medfedaug.utils.printable import printable

PARENTS = ("nvflare.private.fed.app.client.client_train", "nvflare.private.fed.app.server.server_train")
"""Modules that the process of a site's and of the server's kit runs."""

RECORD_FILE = "running.json"
"""The record's file in the kit."""

START_LOG = "start.log"
"""File in the kit with the output of its start script, where `start` ran it."""

RECENT = 600.0
"""Seconds within which repeated starts are a loop."""

LATEST = 253_402_300_799.0
"""End of the year 9999, the latest time of a record."""

_FORMAT = "running_kit", 1
_SILENT = 300.0  # seconds without an answer of the server after which a site is of no use
_FRESH = 150.0  # seconds, five times the period of the record
_LOCAL = ("resources.json", "authorization.json", "privacy.json", "log_config.json")
_BY_DIGEST = ("privacy.json", "log_config.json")
# Read for every job, and not at the start.
_WITH_EACH_JOB = ("class_allow_list", "class_list_enforcement_mode")
_LONGEST = 70
_LOOP = "sub_start.sh"
_WRITER = "KitStatus"
_STAYS = 5.0  # seconds after which a process that writes no record counts as started


_Time = Annotated[float, Ge(0), Le(LATEST)]
# The server says it, and a person may type it: nothing else can stand in it.
_VERSION = r"[0-9][0-9A-Za-z.+!]{0,39}"
_Version = Annotated[str, StringConstraints(pattern=rf"^({_VERSION})?$")]


@dataclass(frozen=True)
class ProcessRecord:
    """Record that a kit's process writes of itself.

    Args:
        pid: its number, in its own container if it has one.
        started: when it started, in seconds since 1970, as all times here.
        starts: the starts of the last minutes, this one included.
        settings: see `settings_at_start`.
        written: when the record was written.
        stopping: whether the process was asked to end.
        heard: at a site, when the server last answered.
        clock: at a site, the server's clock minus this machine's, in seconds.
        server_version: at a site, the version of medfedaug at the server.
        sites: at the server, when each site was last heard from.
        namespace: of the process's number: another container has another one.
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
            found = parse_versioned((Path(kit) / RECORD_FILE).read_text(), *_FORMAT)
            return _RECORD.validate_python({one.name: found[one.name] for one in fields(cls)})
        except (OSError, ValueError, KeyError):  # pydantic's error is a ValueError
            return None

    @property
    def recent_starts(self) -> int:
        """Starts of the last minutes, of which none but the first was asked for."""
        return len(self.starts) if self.starts and time.time() - self.starts[-1] < RECENT else 1

    def is_alive(self) -> bool:
        """Return whether its process runs: it wrote lately, and is there where it can be seen."""
        seen = self.namespace != pid_namespace() or psutil.pid_exists(self.pid)
        return seen and abs(time.time() - self.written) < _FRESH


_RECORD = TypeAdapter(ProcessRecord)


def pid_namespace() -> str:
    """Return the system's name of the processes that this one can see; empty where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_version(text: str) -> bool:
    """Return whether a text can be the version of a package.

    Example:
        >>> is_version("0.3.0"), is_version("0.3.0; reboot")
        (True, False)
    """
    return re.fullmatch(_VERSION, text) is not None


def find_trouble(kit: str | Path, *, server: bool) -> str:
    """Ask the record of a kit's process for what keeps it from work; empty where nothing does.

    A process writes it every half minute, and a site when the server has answered it.
    """
    record = ProcessRecord.load(kit)
    if record is None or not record.is_alive():
        return "does not run" if find_process(kit) is None else "runs without the components of site-config"
    if record.stopping:
        return "was asked to stop"
    silent = time.time() - (record.heard or record.started)
    if not server and silent > _SILENT:
        return f"the server has not answered for {silent:.0f} s"
    return ""


# ------------------------------------------------------------------ what it reads


def settings_at_start(kit: str | Path) -> dict[str, str]:
    """The content of the files that a kit's process reads only when it starts, as short texts by name."""
    kit = Path(kit)
    found = {"medfedaug": __version__, "nvflare": metadata.version("nvflare")}
    for name in _LOCAL:
        content = _in_force(kit / "local" / name)
        if name in _BY_DIGEST and content:
            content = _digest(json.dumps(content, sort_keys=True).encode())
        found.update(_entries(f"local/{name}", content))
    for path in sorted((kit / "startup").glob("*")):
        if path.suffix in (".crt", ".key", ".pem", ".json") and path.is_file():  # a FIFO would be waited for
            found[f"startup/{path.name}"] = _digest(_bytes(path))
    return found


def changes_at_restart(running: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Describe each entry that a restart would change.

    Example:
        >>> changes_at_restart({"nvflare": "2.9.0"}, {"nvflare": "2.9.1"})
        {'nvflare': '2.9.0 runs, 2.9.1 after a restart'}
    """
    names = [*running, *(name for name in now if name not in running)]
    return {
        name: f"{running.get(name, 'nothing')} runs, {now.get(name, 'nothing')} after a restart"
        for name in names
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
    """The entries below a value; a component is one, by its class and its arguments."""
    if isinstance(value, dict) and "path" in value:
        arguments = value.get("args") or {}
        name = str(value["path"]).rsplit(".", 1)[-1]
        yield at, name + (f" {_short(arguments)}" if arguments else "")
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in _WITH_EACH_JOB:
                yield from _entries(f"{at}: {key}" if at.endswith(".json") else f"{at}.{key}", part)
    elif isinstance(value, list) and value and all(isinstance(one, dict) and "id" in one for one in value):
        for one in value:
            yield from _entries(f"{at}.{one['id']}", one)
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


# ------------------------------------------------------------------ the process


def find_process(kit: str | Path) -> psutil.Process | None:
    """Return the process of a kit that runs on this machine, outside of other containers."""
    kit = Path(kit).resolve()
    for process in psutil.process_iter():
        command = _command(process)
        if not any(module in command for module in PARENTS) or "-m" not in command:
            continue
        # `python3 -m MODULE -m KIT`: the last one names the kit.
        folder = command[len(command) - command[::-1].index("-m") :][:1]
        if folder and Path(folder[0]).resolve() == kit:
            return process
    return None


def _find_loop(kit: Path) -> psutil.Process | None:
    """The script that starts the process again when it has died.

    The number in a kit that was copied, or from before a reboot, may be that of another kit's script.
    """
    try:
        process = psutil.Process(int((kit / "daemon_pid.fl").read_text()))
        folder = Path(process.cwd())
    except (OSError, ValueError, psutil.Error):
        return None
    script = next((part for part in _command(process) if part.endswith(_LOOP)), None)
    own = script is not None and (folder / script).resolve().parent == (kit / "startup").resolve()
    return process if own else None


def _command(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else list(process.cmdline())
    except psutil.Error:
        return []


def start(kit: str | Path, timeout: float = 60.0) -> str:
    """Start a kit that does not run, and wait until its process has written its record.

    Raises:
        RunFailed: with the last line of the output, when the process does not stay.
    """
    kit = Path(kit).resolve()
    if (running := find_process(kit)) is not None:
        return f"runs already, as process {running.pid}"
    script = kit / "startup" / "start.sh"
    if not script.is_file():
        raise ConfigError(f"{script} is missing; this kit is started in another way")
    if _find_loop(kit) is None:
        # A number from before a reboot may be another program's now, and NVFlare would not start.
        try:
            (kit / "daemon_pid.fl").unlink(missing_ok=True)
        except OSError as error:
            found = f"{kit / 'daemon_pid.fl'}: cannot be removed ({error.strerror})"
            raise RunFailed(f"{found}; remove it, or the kit does not start") from error
        descriptor = os.open(kit / START_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as log:
            try:
                subprocess.run(
                    [script], cwd=kit, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise RunFailed(f"{script}: cannot be run ({error.strerror})") from error
            except subprocess.CalledProcessError as error:
                raise RunFailed(f"{kit}: does not start: {_last_error(kit)}") from error
    return _await_up(kit, before=None, timeout=timeout)


def stop(kit: str | Path, timeout: float = 60.0) -> str:
    """Stop a kit without a question, and wait until its process and its start script have ended."""
    kit = Path(kit).resolve()
    process, loop = find_process(kit), _find_loop(kit)
    left = [one for one in (process, loop) if one is not None]
    if not left:
        return "does not run"
    if loop is None and process is not None:
        process.terminate()
    else:
        (kit / "shutdown.fl").touch()
    _, alive = psutil.wait_procs(left, timeout=timeout)
    if alive:
        raise RunFailed(f"{kit}: process {alive[0].pid} has not ended within {timeout:g} s")
    return "has stopped"


def restart(kit: str | Path, timeout: float = 60.0) -> str:
    """Stop the process of a kit and start it again, and wait until the new one has written its record.

    Where a service or a container runs the kit, it stays: only the process below it is new.

    Raises:
        RunFailed: when the old process does not end, or the new one does not stay.
    """
    kit = Path(kit).resolve()
    process, loop = find_process(kit), _find_loop(kit)
    if process is None and loop is None:
        return start(kit, timeout)
    if loop is None:
        stop(kit, timeout)
        return start(kit, timeout)
    (kit / "restart.fl").touch()
    if process is not None and psutil.wait_procs([process], timeout=timeout)[1]:
        raise RunFailed(f"{kit}: process {process.pid} has not ended within {timeout:g} s")
    return _await_up(kit, before=process.pid if process else None, timeout=timeout)


def _await_up(kit: Path, before: int | None, timeout: float) -> str:
    """Wait until the new process has a record of its own, and at a site until the server has answered."""
    begun, deadline = time.time(), time.monotonic() + timeout
    writes = any(value == _WRITER for value in settings_at_start(kit).values())

    def new() -> psutil.Process | None:
        process = find_process(kit)
        return process if process is not None and process.pid != before else None

    def record() -> ProcessRecord | None:
        process, found = new(), ProcessRecord.load(kit)
        return found if process is not None and found is not None and found.pid == process.pid else None

    def is_settled() -> bool:
        found = record()
        if found is not None and sum(when > begun for when in found.starts) > 1:
            raise RunFailed(f"{kit}: does not stay: {_last_error(kit)}")
        if not writes:
            return (process := new()) is not None and time.time() - process.create_time() > _STAYS
        return found is not None and (found.heard is not None or (kit / "startup/fed_server.json").exists())

    settled, process = _until(is_settled, deadline), new()
    if process is None:
        raise RunFailed(f"{kit}: does not start: {_last_error(kit)}")
    text = f"runs as process {process.pid}"
    if not writes:
        return f"{text}, without the components of site-config"
    return text if settled else f"{text}, and the server has not answered so far"


def _until(condition: Callable[[], Any], deadline: float) -> Any:
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _last_error(kit: Path) -> str:
    """The last error in the output of the process."""
    try:
        lines = (kit / START_LOG).read_text(errors="replace").splitlines()
    except OSError:
        return "its output says why"
    errors = [line.strip() for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line.strip())]
    return printable((errors or [line for line in lines if line.strip()] or ["its output is empty"])[-1])[
        :300
    ]
