"""NVFlare's simulator in forks of a process with all packages imported (`docs/decisions/fast_start.md`).

The prepared process is ``python -m medfedaug.nvflare_jobs.simulator.forked_simulator``, or a fork of a
command that has imported these packages and computed nothing (`prepare`). It waits for one line on standard
input, and then supervises the simulator (`medfedaug.nvflare_jobs.simulator.supervised`). The simulator is its
first fork, and requests a fork for each site through a private socket pair.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from medfedaug.nvflare_jobs.simulator.simulator_process import WORKER, Start, no_fast_start, waiting
from medfedaug.nvflare_jobs.simulator.supervised import supervise

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_LARGEST = 2**20  # bytes of a request for a site

_MODULES = (
    "torch._dynamo",  # the first step of an optimiser imports it
    "nvflare.fuel.f3.drivers.aio_http_driver",  # each process imports all of NVFlare's drivers
    "monai.networks.nets",
    "monai.transforms",
    "monai.losses",
    "monai.inferers",
    "medfedaug.nvflare_jobs.job.controller",
    "medfedaug.nvflare_jobs.job.executor",
    "medfedaug.nvflare_jobs.simulator.short_waits",
)


def main() -> int:
    """Import, wait, and run; return the exit code of the simulator, 0 without a simulation."""
    gc.disable()
    for name in _MODULES:
        importlib.import_module(name)
    gc.freeze()  # a fork that collects garbage does not copy shared memory
    gc.enable()
    line = _read_line(0)
    if not line:
        return 0
    order = json.loads(line)
    start = Start(**order["start"])
    os.environ.clear()
    os.environ.update(order["environment"])
    _write_to(order["log"])
    if reason := _no_forks():
        print(f"server and sites import their packages afresh: {reason}", flush=True)
        os.execv(sys.executable, start.fresh)
    sites = ForkedSites(start)
    return supervise(start.lock, sites.start_simulator, sites)


def prepare() -> None:
    """Fork this process for the next simulation; it has imported packages, and computed nothing."""
    if no_fast_start() is not None or _no_forks() is not None:
        return
    source, lifeline = os.pipe()
    pid = _fork(lambda: _wait(source), {source})
    os.close(source)
    waiting[:] = [_Fork(pid, lifeline)]


class _Fork:
    """A fork of this process with a pipe to its standard input, as `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: int) -> None:
        self.pid, self.stdin = pid, os.fdopen(stdin, "wb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> Any:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _wait(source: int) -> int:
    # The end of standard input, and no signal, tells it that its parent has died: it ends the others first.
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, 0, 0, 0, 0)
    os.setsid()
    os.dup2(source, 0)
    os.close(source)
    _write_to(os.devnull)
    return main()


def _write_to(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _no_forks() -> str | None:
    """Return the reason why this process cannot be forked; ``None`` where it can."""
    if threading.active_count() > 1:
        return "an imported package has started a thread"
    with suppress(OSError):
        if any(path.readlink().name.startswith("nvidia") for path in Path("/proc/self/fd").iterdir()):
            return "an imported package has opened a GPU"
    return None


class ForkedSites:
    """Fork the simulator, and a site for each of its requests."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._requests, self._simulator = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reports: dict[int, int] = {}

    def fileno(self) -> int:
        """Return the file descriptor of requests."""
        return self._requests.fileno()

    def start_simulator(self) -> int:
        """Fork the simulator."""
        from medfedaug.nvflare_jobs.simulator.short_waits import run_simulator

        forks, arguments = self._simulator, self._start.arguments
        pid = _fork(lambda: _limited(run_simulator, arguments, _Processes(forks)), {forks.fileno()})
        forks.close()
        return pid

    def answer(self) -> bool:
        """Fork a site."""
        message, files, _, _ = socket.recv_fds(self._requests, _LARGEST, 1)
        if not message:
            return False
        request = json.loads(message)
        (report,) = files
        pid = _fork(lambda: _run_site(request, len(self._start.sites)), ())
        self._reports[pid] = report
        os.write(report, b"%d\n" % pid)
        return True

    def ended(self, pid: int, code: int) -> None:
        """Report the end of a site to the simulator."""
        if (report := self._reports.pop(pid, None)) is not None:
            with suppress(OSError):  # the simulator is gone
                os.write(report, b"%d\n" % code)
            os.close(report)


def _fork(run: Callable[[], int | None], keep: Collection[int]) -> int:
    """Run a function in a fork, which ends with this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    return pid if pid else _run_and_exit(run, keep, parent)


def _run_and_exit(run: Callable[[], int | None], keep: Collection[int], parent: int) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before
            os._exit(code)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Above all the lock and the lifeline, which must end with the parent.
        for file in [int(name) for name in os.listdir("/proc/self/fd")]:
            if file > 2 and file not in keep:
                with suppress(OSError):  # the descriptor of the listing itself
                    os.close(file)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        # As in a fresh process; PyTorch's generator starts equally in each.
        random.seed()
        np.random.seed()
        code = run() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else bool(error.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # exit handlers belong to the parent


def _run_site(request: dict[str, Any], sites: int) -> None:
    from medfedaug.nvflare_jobs.simulator.short_waits import run_site

    os.setsid()  # NVFlare ends the group of a site's process
    for name in request["unset"]:
        os.environ.pop(name, None)
    os.environ.update(request["set"])
    # The folder of a job's code, which a fresh process would read at its start.
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    _limited(run_site, request["command"], sites)


def _limited(run: Callable[..., int | None], *arguments: Any) -> int | None:
    """Run with the threads of the environment, which PyTorch reads when it is imported."""
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        torch.set_num_threads(int(threads))
    return run(*arguments)


class _Processes:
    """Module `subprocess` for NVFlare's simulator, where sites are forks."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, forks: socket.socket) -> None:
        self._forks = forks

    def Popen(self, command: Sequence[str], *, env: dict[str, str], **_: Any) -> SiteProcess:  # noqa: N802, its name there
        """Start a site."""
        request = {
            "command": [*command[command.index("-m") + 1 :]],
            "set": {name: value for name, value in env.items() if os.environ.get(name) != value},
            "unset": sorted(os.environ.keys() - env.keys()),
        }
        return SiteProcess(self._forks, json.dumps(request).encode())


def _read_line(source: int) -> bytes:
    """Read to the end of a line; empty at the end of the file."""
    text = b""
    while not text.endswith(b"\n"):
        if not (more := os.read(source, 1)):
            return b""
        text += more
    return text


class SiteProcess:
    """A site as a fork of another process, with the part of `subprocess.Popen` that the simulator uses."""

    def __init__(self, forks: socket.socket, request: bytes) -> None:
        self._report, write = os.pipe()
        socket.send_fds(forks, [request], [write])
        os.close(write)
        self.pid = int(_read_line(self._report) or -1)
        self.returncode: int | None = -signal.SIGKILL if self.pid < 0 else None

    def poll(self) -> int | None:
        """Return the exit code; ``None`` while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end."""
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(WORKER, timeout or 0)
            # Without a code the parent of all is gone, and this process with it.
            self.returncode = int(_read_line(self._report) or -signal.SIGKILL)
            os.close(self._report)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the command waits for this process, which has nothing left to do
