"""Start NVFlare's simulator, in forks of a prepared process or in fresh processes.

This module imports nothing large: a command prepares a simulation before it imports PyTorch itself, and both
import at the same time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import IO

FAST_START_VARIABLE = "MEDFEDAUG_FAST_START"
VERSIONS = ("2.9.0",)
"""NVFlare's versions that `medfedaug.nvflare_jobs.simulator.short_waits` supports."""
WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
"""The module that NVFlare starts for each site."""

_SIMULATOR = "nvflare.private.fed.app.simulator.simulator"
_FORKED = "medfedaug.nvflare_jobs.simulator.forked_simulator"
_SUPERVISOR = str(Path(__file__).with_name("supervised.py"))


@dataclass(frozen=True, kw_only=True)
class Start:
    """A simulation that is ready to start; ``lock`` stays locked while one of its processes is alive."""

    job: str
    workspace: str
    sites: Sequence[str]
    environment: Mapping[str, str]
    lock: str
    log: str

    @property
    def arguments(self) -> list[str]:
        """Arguments of NVFlare's simulator."""
        number = str(len(self.sites))
        return [self.job, "-w", self.workspace, "-c", ",".join(self.sites), "-n", number, "-t", number]

    @property
    def fresh(self) -> list[str]:
        """The command that starts server and sites as fresh processes, under a supervisor."""
        simulator = [sys.executable, "-m", _SIMULATOR, *self.arguments]
        return [sys.executable, _SUPERVISOR, self.lock, *simulator]

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> Start:
        """Read `to_json`."""
        return cls(**json.loads(line))


def no_fast_start() -> str | None:
    """Return the reason why server and sites are fresh processes; ``None`` where they may be forks."""
    if os.environ.get(FAST_START_VARIABLE, "1") == "0":
        return f"{FAST_START_VARIABLE}=0"
    if sys.platform != "linux":
        return "processes are forked on Linux alone"
    installed = version("nvflare")
    if installed not in VERSIONS:
        return f"a fast start is for NVFlare {', '.join(VERSIONS)}, and {installed} is installed"
    return None


class SimulatorProcess:
    """The process that supervises a simulation, and runs as long as its standard input is open."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> None:
        self.environment, self._output = dict(environment), output
        # In a separate session: this process alone handles a signal to its group.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )

    @classmethod
    def start(cls, start: Start, threads: int | None) -> SimulatorProcess:
        """Start a simulation."""
        environment = _environment(threads)
        if no_fast_start() is not None:
            with Path(start.log).open("wb") as log:
                return cls(start.fresh, {**environment, **start.environment}, log)
        process = _take()
        if process is not None and not process._is_ready(environment):
            process._discard()
            process = None
        process = process or cls.waiting(environment)
        # Packages set variables when they are imported, after the start of the prepared process.
        new = {name: value for name, value in environment.items() if name not in process.environment}
        process._send(replace(start, environment={**new, **start.environment}))
        return process

    @classmethod
    def waiting(cls, environment: Mapping[str, str]) -> SimulatorProcess:
        """Start a process that imports all packages, and then waits for a simulation."""
        return cls([sys.executable, "-m", _FORKED], environment, tempfile.TemporaryFile())

    def _is_ready(self, environment: Mapping[str, str]) -> bool:
        """Return whether it runs, and none of its variables has changed."""
        return self.returncode is None and self.environment.items() <= environment.items()

    def _send(self, start: Start) -> None:
        self._log = Path(start.log)
        self._log.touch()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and its output has the reason
            self._process.stdin.write(start.to_json().encode() + b"\n")
            self._process.stdin.flush()

    @property
    def returncode(self) -> int | None:
        """The exit code; ``None`` while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End all remaining processes, and wait for them."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        if not self._output.closed:
            if not self._log.stat().st_size:  # it ended before it wrote to its log
                self._output.seek(0)
                with self._log.open("wb") as log:
                    shutil.copyfileobj(self._output, log)
            self._output.close()

    def _discard(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._output.close()


def _environment(threads: int | None) -> dict[str, str]:
    # If each site starts as many threads as there are cores, sites mostly wait for each other.
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    }


_lock = threading.Lock()
_prepared: SimulatorProcess | None = None


def prepare(threads: int | None) -> None:
    """Start a process that imports all packages, for the next simulation, unless processes are fresh."""
    global _prepared
    discard()
    if no_fast_start() is None:
        process = SimulatorProcess.waiting(_environment(threads))
        with _lock:
            _prepared = process


def discard() -> None:
    """End the prepared process, if no simulation has used it."""
    if (process := _take()) is not None:
        process._discard()


def _take() -> SimulatorProcess | None:
    global _prepared
    with _lock:
        process, _prepared = _prepared, None
    return process
