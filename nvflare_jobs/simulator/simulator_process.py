"""Start NVFlare's simulator, in forks of a prepared process or in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

FAST_START_VARIABLE = "MEDFEDAUG_FAST_START"
VERSIONS = ("2.9.0",)  # NVFlare's versions that `medfedaug.nvflare_jobs.simulator.short_waits` supports
WORKER = "nvflare.private.fed.app.simulator.simulator_worker"  # the module that NVFlare starts for each site

_SIMULATOR = "nvflare.private.fed.app.simulator.simulator"
_FORKED = "medfedaug.nvflare_jobs.simulator.forked_simulator"
_SUPERVISOR = str(Path(__file__).with_name("supervised.py"))


@dataclass(frozen=True, kw_only=True)
class Start:
    """A simulation that is ready to start; ``lock`` stays locked while one of its processes is alive."""

    job: str
    workspace: str
    sites: Sequence[str]
    lock: str

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


def no_fast_start() -> str | None:
    """Return the reason why server and sites are fresh processes; ``None`` where they may be forks."""
    if os.environ.get(FAST_START_VARIABLE, "1") == "0":
        return f"{FAST_START_VARIABLE}=0"
    if sys.platform != "linux":
        return "processes are forked only on Linux"
    installed = version("nvflare")
    if installed not in VERSIONS:
        return f"a fast start is for NVFlare {', '.join(VERSIONS)}, and {installed} is installed"
    return None


waiting: list[Any] = []
"""The fork that waits for a simulation (`forked_simulator.prepare`), with methods of `subprocess.Popen`."""


class SimulatorProcess:
    """The process that supervises a simulation, and runs as long as its standard input is open.

    Args:
        start: the simulation.
        environment: variables of its processes, in addition to those of this one.
        log: a file for their output.
    """

    def __init__(self, start: Start, environment: dict[str, str], log: Path) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        forks = no_fast_start() is None
        if forks and waiting:
            self._process = waiting.pop()
        else:
            command = [sys.executable, "-m", _FORKED] if forks else start.fresh
            with log.open("wb") as output:
                # In a separate session: this process alone handles a signal to its group.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        if forks:
            line = json.dumps({"start": asdict(start), "environment": environment, "log": str(log.resolve())})
            with suppress(BrokenPipeError):  # it has ended, and its log has the reason
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()

    @property
    def returncode(self) -> int | None:
        """The exit code; ``None`` while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End all remaining processes, and wait for them."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
