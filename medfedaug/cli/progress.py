"""Progress bars with the remaining time, and lines about events of a run."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text
from typing_extensions import Self

from medfedaug.cli.console import err_console, say
from medfedaug.utils.event_text import EventLines
from medfedaug.utils.printable import printable

_MOST_LEFT_OUT = 20
QUIET = 20.0
"""Seconds without a line after which, without a terminal, a line says that the run continues."""

_NOW = {
    "prepared": "{site} is ready",
    "round_started": "round {round}",
    "stage": "{text}",
    "tested": "{site} tested",
    "trained": "round {round}: {site} trained",
    "unseen": "{site} is ready",
}
"""The work of a run that an event begins or ends, by kind."""

_WARNINGS = {
    "remark": "{case}: {text}",
    "unlike": "{case}: unlike the federation's images: {text}",
    "unusual": "{case}: unlike the site's training cases: {text}",
}
"""Lines about a case that a user should check."""


class _DescriptionColumn(ProgressColumn):
    """Current item of a progress bar: names of sites and cases, in one line and without markup."""

    def render(self, task: Task) -> Text:
        return Text(printable(task.description))


def _bar(*more: ProgressColumn) -> Progress:
    return Progress(
        _DescriptionColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *more,
        console=err_console,
        disable=not err_console.is_terminal,
    )


class Clock:
    """Estimate of the remaining time, from the finished part."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.restart()

    def restart(self, done: int = 0) -> None:
        """Count from now, with a number of units done before."""
        self.begun = self.last = time.monotonic()
        self.done = self.first = done

    def count(self, done: int) -> None:
        """Set the number of finished units."""
        self.last, self.done = time.monotonic(), done

    def left(self) -> str:
        """Return the remaining time in words."""
        if self.done >= self.total:  # rounds do not predict the time of tables, pictures and page
            return "nearly done"
        if self.done <= self.first:
            return f"time left: known after the {'next' if self.first else 'first'}"
        each = (self.last - self.begun) / (self.done - self.first)
        # The current unit has used the seconds since the last one, and ends later than now.
        remaining = each * (self.total - self.done) - min(time.monotonic() - self.last, each)
        return (
            f"about {duration(remaining)} left" if remaining else "the last one takes longer than the others"
        )


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(42), duration(200), duration(9000)
    ('42 s', '3 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class RoundProgress:
    """A progress bar over the rounds, and the lines of `medfedaug.utils.event_text.EventLines`.

    Without a terminal, a line says now and then that the run continues.
    """

    unit = "round"

    def __init__(self, total: int) -> None:
        self.bar = _bar(SpinnerColumn(), TextColumn("{task.fields[left]}"))
        self.teller, self.clock = EventLines(total), Clock(total)
        self.doing, self._said, self._over = "starting", time.monotonic(), threading.Event()
        self._lock = threading.RLock()

    def __enter__(self) -> RoundProgress:
        self.bar.start()
        self.task = self.bar.add_task(self.doing, total=self.clock.total, left="")
        if self.bar.disable:
            self._beat = threading.Thread(target=self._go_on, daemon=True)
            self._beat.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.bar.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Process an event of a run."""
        kind = event["event"]
        for line in self.teller.lines(event):
            self._line(line)
        if kind in _NOW:
            self._now(_NOW[kind].format_map(event))
        if kind == "round_started" and event["round"] == 1:
            self._count(0, restart=True)
        elif kind == "resumed":
            self._count(event["round"], restart=True)
        elif kind == "round_finished":
            self._count(event["round"])
            if event["round"] == self.clock.total:
                self._now("validating and testing the model")

    def _count(self, done: int, *, restart: bool = False) -> None:
        with self._lock:
            if restart:
                self.clock.restart(done)
            else:
                self.clock.count(done)
            self.bar.update(self.task, completed=done, left=self.clock.left() if done else "")

    def _now(self, doing: str) -> None:
        self.doing = doing
        self.bar.update(self.task, description=doing)

    def _line(self, text: str) -> None:
        with self._lock:
            self._said = time.monotonic()
            say(text, err=True)

    def _go_on(self) -> None:
        begun = time.monotonic()
        while not self._over.wait(min(1.0, QUIET / 4)):
            now = time.monotonic()
            if now - self._said < QUIET:
                continue
            done = f"{self.clock.done} of {self.clock.total} {self.unit}s"
            self._line(f"... {self.doing}; {done} after {duration(now - begun)}; {self.clock.left()}")


class SweepProgress(RoundProgress):
    """A progress bar over the runs, and one line for each."""

    unit = "run"

    def show(self, event: dict[str, Any]) -> None:
        """Process an event of the sweep, or of one of its runs."""
        kind = event["event"]
        if kind == "run":
            # Runs that were finished before took no time, and predict nothing.
            self._count(event["number"], restart=not event["made"])
            self._line(f"{event['number']}/{event['of']} {event['folder']}  ({self.clock.left()})")
        elif kind == "failed":
            self._line(f"failed: {event['folder']}: {event['reason']}")
            self._count(self.clock.done + 1, restart=not event["made"])
        elif kind in ("round_started", "round_finished"):
            self._now(f"round {event['round']}")


class CaseProgress:
    """A progress bar over cases, and a line for each case to check."""

    first = "reading"

    def __init__(self) -> None:
        self.bar = _bar()

    def __enter__(self) -> Self:
        self.bar.start()
        self.task = self.bar.add_task(self.first, total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def read(self, number: int, total: int) -> None:
        """Show the number of cases that were read."""
        self.bar.update(self.task, completed=number, total=total)

    def show(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "reading":
            self.read(event["number"], event["of"])
        elif kind in ("found", "fetched"):
            doing = "looking for studies" if kind == "found" else "fetching"
            self.bar.update(self.task, description=doing, completed=event["number"], total=event["of"])
        elif kind == "start":
            self.bar.update(self.task, description="predicting", completed=0, total=event["todo"])
            if event["there"]:
                self._line(f"{event['there']} of {event['cases']} cases are there already")
        elif kind == "case":
            self.bar.update(self.task, description=event["case"])
        elif kind == "note":
            self._line(event["text"])
        elif kind == "left_out":
            for file in event["left_out"][:_MOST_LEFT_OUT]:
                self._line(f"left out: {file['path']}: {file['reason']}")
            if (more := len(event["left_out"]) - _MOST_LEFT_OUT) > 0:
                self._line(f"left out: {more} more, named in predictions.json")
        elif kind in _WARNINGS:
            self._line(_WARNINGS[kind].format_map(event), "yellow")
        elif kind in ("predicted", "failed"):
            self.bar.advance(self.task)

    def _line(self, text: str, style: str | None = None) -> None:
        say(text, style, err=True)


class ImportProgress(CaseProgress):
    """A progress bar over studies, with the number of received objects."""

    first = "looking for studies"

    def __init__(self) -> None:
        super().__init__()
        self._came = self._objects = 0
        self._lock = threading.Lock()

    def show(self, event: dict[str, Any]) -> None:
        """Process an event of an import, from any thread."""
        kind = event["event"]
        if kind == "found":
            self.bar.update(self.task, completed=event["number"], total=event["of"])
        elif kind == "start":
            self._objects = event["objects"]
            self.bar.update(self.task, description="importing", completed=0, total=event["todo"])
            if event["there"]:
                self._line(f"{event['there']} of {event['there'] + event['todo']} studies are there already")
        elif kind == "object":
            with self._lock:
                self._came += 1
                count = f"{self._came} of {self._objects}" if self._came <= self._objects else f"{self._came}"
            self.bar.update(self.task, description=f"importing: {count} objects")
        elif kind in _WARNINGS:
            self._line(_WARNINGS[kind].format_map(event), "yellow")
        elif kind in ("imported", "failed"):
            self.bar.advance(self.task)


@contextmanager
def resumable(*more: str) -> Iterator[None]:
    """Print how to continue if the user stops a command with Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        again = [arg for arg in sys.argv[1:] if arg != "--overwrite"]
        again += [option for option in more if option not in again]
        say(f"stopped; continue with: medfedaug {shlex.join(again)}", err=True)
        raise SystemExit(130) from None
