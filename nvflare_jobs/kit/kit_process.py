"""The process of a kit: its record, and its start, stop and restart.

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
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.utils.files import parse_json, parse_versioned, write_versioned
from medfedaug.utils.printable import printable

PARENTS = ("nvflare.private.fed.app.client.client_train", "nvflare.private.fed.app.server.server_train")
"""Modules that the process of a site's and of the server's kit runs."""

RECORD_FILE = "running.json"
"""The record's file in the kit."""

START_LOG = "start.log"
"""File in the kit with the output of the start script that `start` ran."""

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
_LOOP = "sub_start.sh"
_WRITER = "KitStatus"
_LOOK = 8.0  # seconds without the server after which a start looks at the way to it
_PYTHON = 30.0  # seconds
_STAYS = 5.0  # seconds after which a process that writes no record counts as started

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
        settings: see `settings_at_start`.
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
        return "does not run" if find_process(kit) is None else "runs without the components of site-config"
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
        command = _command(process)
        # `python3 -m MODULE -m KIT`
        options = [value for option, value in pairwise(command) if option == "-m"]
        if options and any(module in command for module in PARENTS) and Path(options[-1]).resolve() == kit:
            return process
    return None


def _find_loop(kit: Path) -> psutil.Process | None:
    """Return the process of the script that starts the kit's process again when it has died.

    The number in a copied kit, or from before a reboot, may belong to another kit's script.
    """
    try:
        process = psutil.Process(int((kit / "daemon_pid.fl").read_text()))
        folder = Path(process.cwd())
    except (OSError, ValueError, psutil.Error):
        return None
    script = next((part for part in _command(process) if part.endswith(_LOOP)), None)
    if script is None or (folder / script).resolve().parent != (kit / "startup").resolve():
        return None
    return process


def _command(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else list(process.cmdline())
    except psutil.Error:
        return []


def start(kit: str | Path, timeout: float = 60.0) -> str:
    """Start a kit that does not run, and wait until its process has written its record.

    Raises:
        RunFailed: when the process does not stay, with the last line of its output; when it does not reach
            the server, with the reason: then it keeps trying.
    """
    kit = Path(kit).resolve()
    if (running := find_process(kit)) is not None:
        return f"runs already, as process {running.pid}"
    script = kit / "startup" / "start.sh"
    if not script.is_file():
        raise ConfigError(f"{script} is missing; this kit is started in another way")
    if _find_loop(kit) is None:
        if trouble := python_trouble():
            raise RunFailed(f"{kit}: does not start: {trouble}")
        # The number may be another program's since a reboot, and NVFlare would not start.
        number = kit / "daemon_pid.fl"
        try:
            number.unlink(missing_ok=True)
        except OSError as error:
            text = f"{number}: cannot be removed ({error.strerror}); remove it, or the kit does not start"
            raise RunFailed(text) from error
        descriptor = os.open(kit / START_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as log:
            try:
                subprocess.run(
                    [script],
                    cwd=kit,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    check=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunFailed(f"{script}: cannot be run ({error.strerror})") from error
            except subprocess.CalledProcessError as error:
                raise RunFailed(f"{kit}: does not start: {_last_error(kit)}") from error
    return _await_up(kit, before=None, timeout=timeout)


def stop(kit: str | Path, timeout: float = 60.0) -> str:
    """Stop a kit without a question, and wait until its process and its start script have ended."""
    kit = Path(kit).resolve()
    process, loop = find_process(kit), _find_loop(kit)
    if loop is not None:
        (kit / "shutdown.fl").touch()
    elif process is not None:
        process.terminate()
    else:
        return "does not run"
    _, alive = psutil.wait_procs([p for p in (process, loop) if p is not None], timeout=timeout)
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
    if loop is None:
        stop(kit, timeout)
        return start(kit, timeout)
    (kit / "restart.fl").touch()
    if process is not None and psutil.wait_procs([process], timeout=timeout)[1]:
        raise RunFailed(f"{kit}: process {process.pid} has not ended within {timeout:g} s")
    return _await_up(kit, before=process.pid if process else None, timeout=timeout)


def _await_up(kit: Path, before: int | None, timeout: float) -> str:
    """Wait until the new process has written its record, and at a site until the server has answered."""
    from medfedaug.nvflare_jobs.kit.startup import check_connection  # which imports this module

    begun, deadline = time.time(), time.monotonic() + timeout
    writes = any(value == _WRITER for value in settings_at_start(kit).values())

    def new() -> psutil.Process | None:
        process = find_process(kit)
        return process if process is not None and process.pid != before else None

    def is_settled() -> bool:
        process, record = new(), ProcessRecord.load(kit)
        if not writes:
            return process is not None and time.time() - process.create_time() > _STAYS
        if process is None and before is None and _starts(kit) > 1:
            raise RunFailed(f"{kit}: does not stay: {_last_error(kit)}")
        if process is None or record is None or record.pid != process.pid:
            return False
        if sum(when > begun for when in record.starts) > 1:
            raise RunFailed(f"{kit}: does not stay: {_last_error(kit)}")
        return record.heard is not None or (kit / "startup/fed_server.json").exists()

    looked = False
    while not (settled := is_settled()) and time.monotonic() < deadline:
        time.sleep(0.2)
        if not looked and time.time() - begun > _LOOK:
            looked = True
            if wrong := next((check for check in check_connection(kit) if check.ok is False), None):
                raise RunFailed(
                    f"{kit}: is started, and does not reach the server: {wrong.found}. {wrong.advice} "
                    "It keeps trying."
                )
    if (process := new()) is None:
        raise RunFailed(f"{kit}: does not start: {_last_error(kit)}")
    text = f"runs as process {process.pid}"
    if not writes:
        return f"{text}, without the components of site-config"
    return text if settled else f"{text}, and the server has not answered so far"


def _starts(kit: Path) -> int:
    """Return how often the start script has started the process, by its output."""
    try:
        return (kit / START_LOG).read_text(errors="replace").count("new pid ")
    except OSError:
        return 0


def _last_error(kit: Path) -> str:
    """Return the last error in the output of the process."""
    try:
        lines = (kit / START_LOG).read_text(errors="replace").splitlines()
    except OSError:
        return "its output says why"
    lines = [line.strip() for line in lines if line.strip()] or ["its output is empty"]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return printable((errors or lines)[-1])[:300]
