"""Write the events of a job, at the server or a site, to a file in the run's folder and to the log."""

import json
import logging
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from medfedaug.errors import warnings_to
from medfedaug.federation.job_folder import ALIVE, EVENTS, JOB_FOLDER, PULSE
from medfedaug.utils.event_text import EventLines
from medfedaug.utils.printable import printable_values

WARNING = "warning"
_LOGGED = ("failed", "not_answered")  # reported as errors elsewhere
_WARNED = (WARNING, "away")
_log = logging.getLogger("medfedaug")


class EventLog:
    """Write each event to the file as one JSON object, and to the log as lines of `EventLines`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self.name = folder / JOB_FOLDER / EVENTS, name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._teller, self._lock = EventLines(), threading.Lock()  # each site answers in its own thread
        before = self.path.read_bytes() if self.path.exists() else b""
        self._file = self.path.open("a", buffering=1, encoding="utf-8")
        if before and not before.endswith(b"\n"):  # a process ended in the middle of a line
            with suppress(OSError):
                self._file.write("\n")
        self._warned: set[str] = set()
        self._over = threading.Event()
        threading.Thread(target=self._pulse, name="alive", daemon=True).start()

    def _pulse(self) -> None:
        """Show by the time of a file that the job's process is alive."""
        alive = self.path.with_name(ALIVE)
        while True:
            with suppress(OSError):
                alive.touch()
            if self._over.wait(PULSE):
                return

    def __call__(self, event: dict[str, Any]) -> None:
        """Write an event; errors of the disk are left to the files that a job needs."""
        with self._lock:
            for line in self._teller.lines(event) if event["event"] not in _LOGGED else ():
                level = logging.WARNING if event["event"] in _WARNED else logging.INFO
                _log.log(level, "%s: %s", self.name, line)
            if not self._file.closed:  # an answer may come after the end
                with suppress(OSError):
                    self._file.write(json.dumps(printable_values(event)) + "\n")

    def warnings(self) -> AbstractContextManager[None]:
        """Record our warnings, each once, as events: a process of NVFlare has no terminal.

        They may have names of files, which stay in the site's file and log.
        """
        return warnings_to(lambda text: self({"event": WARNING, "text": text}), self._warned)

    def close(self) -> None:
        """Close the file, and ignore errors of the disk."""
        self._over.set()
        with suppress(OSError):
            self._file.close()
            self.path.with_name(ALIVE).unlink(missing_ok=True)
