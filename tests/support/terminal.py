"""A command as a terminal shows it, in a process of its own."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pty
import sys
from multiprocessing.reduction import DupFd

# A command starts in a copy of a process that has imported PyTorch and MONAI, and nothing that prints.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["medfedaug.federation.site.trainer"])


def start(terminal: DupFd, environment: dict[str, str], *args: str) -> None:
    """Run the command in a terminal, with the environment of the test: a copy has that of its original."""
    descriptor = terminal.detach()
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    os.environ.clear()
    os.environ |= {**environment, "TERM": "xterm", "COLUMNS": "100"}
    sys.argv = ["medfedaug", *args]
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    assert not {"medfedaug.cli", "rich"} & set(sys.modules)
    importlib.import_module("medfedaug.cli").main()


def shown_in_a_terminal(*args: str) -> str:
    """Return the text that a pseudo-terminal gets of a command."""
    ours, theirs = pty.openpty()
    process = FORKS.Process(target=start, args=(DupFd(theirs), dict(os.environ), *args))
    process.start()
    os.close(theirs)
    read = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not block:
            break
        read += block
    os.close(ours)
    process.join()
    return read.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
