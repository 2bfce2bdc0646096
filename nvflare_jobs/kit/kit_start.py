"""Start, stop and restart of a kit on this machine."""

import os
import re
import subprocess
import time
from pathlib import Path

import psutil

from medfedaug.errors import ConfigError, RunFailed
from medfedaug.nvflare_jobs.kit.kit import open_kit
from medfedaug.nvflare_jobs.kit.kit_process import ProcessRecord, command_line, find_process, python_trouble
from medfedaug.nvflare_jobs.kit.startup import check_connection
from medfedaug.utils.printable import printable

_START_LOG = "start.log"  # in the kit, the output of the start script
_LOOP = "sub_start.sh"
_LOOK = 8.0  # seconds without the server after which a start looks at the way to it


def _find_loop(kit: Path) -> psutil.Process | None:
    """Return the process of the script that starts the kit's process again when it has died.

    The number in a copied kit, or from before a reboot, may belong to another kit's script.
    """
    try:
        process = psutil.Process(int((kit / "daemon_pid.fl").read_text()))
        folder = Path(process.cwd())
    except (OSError, ValueError, psutil.Error):
        return None
    script = next((part for part in command_line(process) if part.endswith(_LOOP)), None)
    if script is None or (folder / script).resolve().parent != (kit / "startup").resolve():
        return None
    return process


def start(kit: str | Path, timeout: float = 60.0) -> str:
    """Start a kit that does not run, and wait until its process has written its record.

    A process that does not reach the server keeps trying after the error that names the reason.
    """
    kit = Path(kit).resolve()
    if (running := find_process(kit)) is not None:
        return f"runs already, as process {running.pid}"
    script = kit / "startup" / "start.sh"
    if not script.is_file():
        raise ConfigError(f"{script} is missing; this kit is started in another way")
    _check_configured(kit)
    starts = _starts(kit)
    if _find_loop(kit) is None:
        starts = 0
        if trouble := python_trouble():
            raise RunFailed(f"{kit}: does not start: {trouble}")
        # The number may be another program's since a reboot, and NVFlare would not start.
        (kit / "daemon_pid.fl").unlink(missing_ok=True)
        descriptor = os.open(kit / _START_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as log:
            done = subprocess.run(
                [script], cwd=kit, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if done.returncode:
            raise RunFailed(f"{kit}: does not start: {_last_error(kit)}")
    return _await_up(kit, before=None, starts=starts, timeout=timeout)


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
    _await_end(kit, process, loop, timeout=timeout)
    return "has stopped"


def restart(kit: str | Path, timeout: float = 60.0) -> str:
    """Stop the process of a kit and start it again, and wait until the new one has written its record.

    Where a service or a container runs the kit, it stays: only the process below it is new.
    """
    kit = Path(kit).resolve()
    _check_configured(kit)
    process, loop = find_process(kit), _find_loop(kit)
    if loop is None:
        stop(kit, timeout)
        return start(kit, timeout)
    starts = _starts(kit)
    (kit / "restart.fl").touch()
    _await_end(kit, process, timeout=timeout)
    return _await_up(kit, before=process.pid if process else None, starts=starts, timeout=timeout)


def _await_end(kit: Path, *processes: psutil.Process | None, timeout: float) -> None:
    _, alive = psutil.wait_procs([one for one in processes if one is not None], timeout=timeout)
    if alive:
        raise RunFailed(f"{kit}: process {alive[0].pid} has not ended within {timeout:g} s")


def _check_configured(kit: Path) -> None:
    """Refuse a kit that would admit any job, and send error logs, which name files, to the server."""
    if missing := open_kit(kit).missing():
        raise ConfigError(
            f"{kit}: not configured: run medfedaug site configure {kit} first; resources.json lacks "
            + "; ".join(missing)
        )


def _await_up(kit: Path, before: int | None, starts: int, timeout: float) -> str:
    """Wait until the new process has written its record, and at a site until the server has answered."""
    begun, deadline = time.time(), time.monotonic() + timeout
    opened = open_kit(kit)

    def new() -> psutil.Process | None:
        process = find_process(kit)
        return process if process is not None and process.pid != before else None

    def is_settled() -> bool:
        process, record = new(), ProcessRecord.load(kit)
        if _starts(kit) > starts + 1:
            raise RunFailed(f"{kit}: stopped again: {_last_error(kit)}")
        if process is None or record is None or record.pid != process.pid:
            return False
        return record.heard is not None or opened.server

    looked = False
    while not (settled := is_settled()) and time.monotonic() < deadline:
        time.sleep(0.2)
        if not looked and time.time() - begun > _LOOK:
            looked = True
            if wrong := next((check for check in check_connection(kit) if check.ok is False), None):
                raise RunFailed(
                    f"{kit}: is started, but does not reach the server: {wrong.found}. {wrong.advice} "
                    "The kit keeps trying."
                )
    if (process := new()) is None:
        raise RunFailed(f"{kit}: does not start: {_last_error(kit)}")
    text = f"runs as process {process.pid}"
    return text if settled else f"{text}, and the server has not answered so far"


def _starts(kit: Path) -> int:
    """Return how often the start script has started the process, by its output."""
    return _output(kit).count("new pid ")


def _output(kit: Path) -> str:
    file = kit / _START_LOG
    return file.read_text(errors="replace") if file.exists() else ""


def _last_error(kit: Path) -> str:
    """Return the last error in the output of the process."""
    lines = [line.strip() for line in _output(kit).splitlines() if line.strip()] or ["its output is empty"]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return printable((errors or lines)[-1])[:300]
