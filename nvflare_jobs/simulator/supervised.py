"""Run a command, and leave none of its processes behind.

Run this file as ``python supervised.py LOCK COMMAND ...``: it imports nothing large.

NVFlare gives every site's process a separate session, so that a signal to `medfedaug simulate` does not reach
them. When standard input ends, because that process has closed it or died, all processes of the command are
killed. The file LOCK is locked until none of them is left, so that nobody else uses the run's folder.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import psutil
from filelock import FileLock

_LIFELINE = 0  # standard input
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_GRACE = 10.0  # seconds in which sites may end by themselves after the command
_PERIOD = 0.05


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    lock, *command = arguments
    return supervise(lock, lambda: subprocess.Popen(command, stdin=subprocess.DEVNULL).pid)


def supervise(lock: str, start: Callable[[], int], handler: Any = None) -> int:
    """Start a process, wait until it and all its children have ended, and return its exit code.

    Requests to ``handler`` (`medfedaug.nvflare_jobs.simulator.forked_simulator.ForkedSites`) are answered
    meanwhile.

    This process has one thread only, so that it can be forked at any time.
    """
    # Handled and not ignored, since children would inherit ignored signals.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":  # processes whose parent has died become children of this one
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    with FileLock(lock), selectors.PollSelector() as selector:
        first, code = start(), None
        for source in (_LIFELINE, woken):
            selector.register(source, selectors.EVENT_READ)
        if handler is not None:
            selector.register(handler, selectors.EVENT_READ, handler.answer)
        deadline = float("inf")  # for all remaining processes
        while True:
            for pid, exit_code in _ended():
                if pid == first:
                    code, deadline = exit_code, min(deadline, time.monotonic() + _GRACE)
                if handler is not None:
                    handler.ended(pid, exit_code)
            if code is not None and not _has_children():
                break
            if time.monotonic() >= deadline:
                _kill_all()
            for key, _ in selector.select(None if deadline == float("inf") else _PERIOD):
                if key.data is not None:
                    more = key.data()
                else:
                    more = bool(_read(key.fd))
                    deadline = deadline if more else 0
                if not more:
                    selector.unregister(key.fileobj)
        os.unlink(lock)
    return code if code >= 0 else 128 - code


def _read(source: int) -> bytes:
    with suppress(BlockingIOError):
        return os.read(source, 4096)
    return b"nothing yet"


def _ended() -> Iterator[tuple[int, int]]:
    """Yield processes that have ended since the last call, with their exit codes."""
    with suppress(ChildProcessError):
        while (status := os.waitpid(-1, os.WNOHANG))[0]:
            yield status[0], os.waitstatus_to_exitcode(status[1])


def _has_children() -> bool:
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def _kill_all() -> None:
    for member in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            member.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
