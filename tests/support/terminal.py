"""A command as a terminal shows it, in a process of its own."""

import os
import pty
import subprocess
import sys


def shown_in_a_terminal(*args: str) -> str:
    """Return the text that a pseudo-terminal gets of a command."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "medfedaug", *args]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment):
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
    return read.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
