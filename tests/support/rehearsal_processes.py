"""Processes that a rehearsal has left."""

import psutil


def left_running(work) -> list[psutil.Process]:
    """Processes of a rehearsal in ``work``, by their command line or their environment."""
    processes = []
    for process in psutil.process_iter():
        try:
            text = " ".join([*process.cmdline(), process.environ().get("HOME", "")])
        except (psutil.Error, OSError):
            continue
        if str(work) in text and process.pid != psutil.Process().pid:
            processes.append(process)
    return processes
