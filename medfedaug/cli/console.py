"""The consoles of all commands, and the tables that several of them print.

All output to a terminal goes through these: texts from outside hold no character that steers it.
"""

import gc
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table as RichTable
from rich.text import Text

from medfedaug.utils.printable import printable, printable_lines


class _Console(Console):
    """A console that escapes characters which steer a terminal, in every text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; only Rich's own control codes stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable_lines(segment.text))

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Show a spinner with a text, which has no markup."""
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
