"""The consoles of all commands, their tables, and progress bars with lines about events of a run.

All output to a terminal goes through these: texts from outside hold no character that steers it.
"""

from __future__ import annotations

import gc
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.status import Status
from rich.table import Table as RichTable
from rich.text import Text
from typing_extensions import Self

from medfedaug.errors import ConfigError
from medfedaug.utils.event_text import EventLines
from medfedaug.utils.printable import printable, printable_lines


class _Console(Console):
    """A console that escapes characters which steer a terminal, in every text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; only Rich's own control codes stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable_lines(segment.text))

    def status(self, status: RenderableType, **options: Any) -> Status:
        return super().status(_printable(status), **options)


class Table(RichTable):
    """A table with headings and cells of one line each, for any text."""

    def __init__(self, *headers: Any, title: Any = None, **options: Any) -> None:
        super().__init__(*headers, title=_printable(title), **options)  # headers through `add_column`

    def add_column(self, header: Any = "", *args: Any, **options: Any) -> None:
        super().add_column(_printable(header), *args, **options)

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(_printable, cells), **options)


def _printable(cell: Any) -> Any:
    """Return a text through `printable`, other contents unchanged."""
    if isinstance(cell, str):
        return Text(printable(cell))
    if isinstance(cell, Text) and printable(cell.plain) != cell.plain:
        return Text(printable(cell.plain), style=cell.style)
    return cell


# Names of sites, files and classes may have brackets, which Rich would read as markup.
out_console, err_console = (_Console(stderr=err, markup=False, highlight=False) for err in (False, True))


@contextmanager
def starting() -> Iterator[None]:
    """Show that a command imports its packages, and collect no garbage among their 800,000 objects."""
    gc.disable()
    try:
        with err_console.status("starting"):
            yield
    finally:
        gc.freeze()
        gc.enable()


def say(text: str, style: str | None = None, *, err: bool = False) -> None:
    """Print a text in one line, without added line breaks: paths and commands can be copied."""
    (err_console if err else out_console).print(printable(text), style=style, soft_wrap=True)


def confirm(question: str, otherwise: str) -> None:
    """Ask a person, and end the command without a yes; ``otherwise`` is the error where nobody can answer."""
    if not sys.stdin.isatty():
        raise ConfigError(otherwise)
    typer.confirm(question, abort=True)


def exit_if(failed: object, code: int = 1) -> None:
    """End the command with an exit code if something failed."""
    if failed:
        raise typer.Exit(code)


def print_page(lines: Iterable[str]) -> None:
    """Print the lines of a page, each through `wrapped`."""
    for line in lines:
        for part in wrapped(line).split("\n"):
            say(part)


def wrapped(line: str) -> str:
    """Wrap a line to the width of the terminal, if the output is one.

    The continuation is indented more than the beginning of any line, so that no wide text looks like another
    line.
    """
    line = printable(line)
    if not out_console.is_terminal:
        return line
    width = max(out_console.width, 40)
    return textwrap.fill(line, width, subsequent_indent=" " * 12, drop_whitespace=False)


def print_scores(scores: dict[str, Any], title: str, scored: Mapping[str, str]) -> None:
    """Print a table of the sites' test scores.

    Args:
        scores: such as ``test`` in ``results.json``.
        scored: owner of the scored model by site, or for the groups ``"test"`` and ``"unseen"``.
    """
    from medfedaug.metrics.registry import find_metric  # imports NumPy

    metrics = list(scores["mean"])
    units = ", ".join(sorted({entry.get("unit") for entry in scores["sites"].values()} - {None}))
    heads = [f"{name} ({units})" if find_metric(name).has_unit and units else name for name in metrics]
    table = Table("site", "model", *heads, "cases", title=title)
    for group, mark in (("sites", ""), ("unseen", " (unseen)")):
        for site, entry in sorted(scores.get(group, {}).items()):
            model = scored.get(site) or scored.get("unseen" if mark else "test", "")
            count = entry.get("scored_cases", len(entry.get("cases", {})))
            table.add_row(site + mark, model, *(number(entry.get(name)) for name in metrics), str(count))
    for site in scores.get("missing", {}):
        table.add_row(site, "", "not tested")
    table.add_row("mean", "", *(number(scores["mean"][name]) for name in metrics), "")
    worst = scores.get("worst", {})
    if len(scores["sites"]) > 1 and any(worst.values()):
        table.add_row("worst", "", *(number((worst.get(name) or {}).get("value")) for name in metrics), "")
    out_console.print(table)
    for site, entry in sorted({**scores["sites"], **scores.get("unseen", {})}.items()):
        if entry.get("note") and entry.get(next(iter(metrics), "")) is None:
            say(f"{site}: no score: {entry['note']}")


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


_MOST_LEFT_OUT = 20
_A_WEEK = 7 * 24 * 3600.0  # s

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
    "no_promise": "{case}: no promise: {text}",
}
"""Lines about a case that a user should check."""


class _DescriptionColumn(ProgressColumn):
    """Current item of a progress bar: names of sites and cases, in one line and without markup."""

    def render(self, task: Task) -> Text:
        return Text(printable(task.description))


class _RemainingColumn(TimeRemainingColumn):
    """Time to the last round; nothing while models are tested and pages are drawn after it."""

    def render(self, task: Task) -> Text:
        return Text() if task.finished else super().render(task)


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(42), duration(200), duration(9000)
    ('42 s', '3 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class _Bar:
    """A progress bar on a terminal, and lines above it."""

    first = "starting"

    def __init__(self, total: int | None = None) -> None:
        columns = (_DescriptionColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        terminal = err_console.is_terminal
        self.total = total
        self.bar = Progress(
            *columns,
            _RemainingColumn(),
            console=err_console,
            disable=not terminal,
            speed_estimate_period=_A_WEEK,  # by default Rich forgets a round after 30 s
        )

    def __enter__(self) -> Self:
        self.bar.start()
        self.task = self.bar.add_task(self.first, total=self.total)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(
        self, description: str | None = None, completed: int | None = None, of: int | None = None
    ) -> None:
        """Show the present work, the finished units, and their number."""
        self.bar.update(self.task, description=description, completed=completed, total=of)


class RoundProgress(_Bar):
    """A progress bar over the rounds, and the lines of `medfedaug.utils.event_text.EventLines`."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.teller = EventLines(total)

    def show(self, event: dict[str, Any]) -> None:
        """Process an event of a run."""
        kind = event["event"]
        for line in self.teller.lines(event):
            say(line, err=True)
        if kind in _NOW:
            self.update(_NOW[kind].format_map(event))
        if kind in ("resumed", "round_finished"):
            self.update(completed=event["round"])


class SweepProgress(_Bar):
    """A progress bar over the runs, and one line for each."""

    def show(self, event: dict[str, Any]) -> None:
        """Process an event of the sweep, or of one of its runs."""
        kind = event["event"]
        if kind == "run":
            self.update(completed=event["number"])
            say(f"{event['number']}/{event['of']} {event['folder']}", err=True)
        elif kind == "failed":
            say(f"failed: {event['folder']}: {event['reason']}", err=True)
            self.bar.advance(self.task)
        elif kind in ("round_started", "round_finished"):
            self.update(f"round {event['round']}")


class CaseProgress(_Bar):
    """A progress bar over cases or studies, and a line for each to check; ``doing`` is done to each."""

    first = "reading"
    _came = 0

    def __init__(self, doing: str = first) -> None:
        super().__init__()
        self.doing = doing

    def show(self, event: dict[str, Any]) -> None:
        """Process an event of a prediction or an import, from any thread."""
        kind = event["event"]
        if kind in ("reading", "found", "fetched"):
            doing = {"found": "looking for studies", "fetched": "fetching"}.get(kind, self.first)
            self.update(doing, event["number"], event["of"])
        elif kind == "start":
            self.update(self.doing, 0, event["todo"])
            if event["there"]:
                number = event.get("cases", event["there"] + event["todo"])
                say(f"{event['there']} of {number} cases are there already", err=True)
        elif kind == "case":
            self.update(event["case"])
        elif kind == "object":
            self._came += 1
            self.update(f"{self.doing}: {self._came} objects")
        elif kind == "note":
            say(event["text"], err=True)
        elif kind == "left_out":
            for file in event["left_out"][:_MOST_LEFT_OUT]:
                say(f"left out: {file['path']}: {file['reason']}", err=True)
            if (more := len(event["left_out"]) - _MOST_LEFT_OUT) > 0:
                say(f"left out: {more} more, named in predictions.json", err=True)
        elif kind in _WARNINGS:
            say(_WARNINGS[kind].format_map(event), "yellow", err=True)
        elif kind in ("predicted", "imported", "failed"):
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
