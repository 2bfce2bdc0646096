"""The consoles of all commands, and the tables that several of them print.

Nothing reaches a terminal but through these: texts from outside hold no character that steers it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table as RichTable
from rich.text import Text

from medfedaug.utils.printable import printable, printable_lines


class _Console(Console):
    """A console that shows characters which steer a terminal as escapes, wherever a text comes from."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; only Rich's own control codes stay as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable_lines(segment.text))

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Show a spinner with a text, which has no markup."""
        return _Status(_shown(status), console=self, **options)


class _Status(Status):
    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        super().update(None if status is None else _shown(status), **options)


class Table(RichTable):
    """A table whose headings and cells have one line each, whatever texts they are given."""

    def __init__(self, *headers: Any, title: Any = None, **options: Any) -> None:
        super().__init__(*headers, title=_shown(title), **options)  # each through `add_column`

    def add_column(self, header: Any = "", *args: Any, **options: Any) -> None:
        super().add_column(_shown(header), *args, **options)

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(_shown, cells), **options)


def _shown(cell: Any) -> Any:
    """A text as `printable` has it; other contents as they are."""
    if isinstance(cell, str):
        return Text(printable(cell))
    if isinstance(cell, Text) and printable(cell.plain) != cell.plain:
        return Text(printable(cell.plain), style=cell.style)
    return cell


# Names of sites, files and classes may have brackets, which Rich would read as markup.
out_console, err_console = (_Console(stderr=err, markup=False, highlight=False) for err in (False, True))


def say(text: str, style: str | None = None, *, err: bool = False) -> None:
    """Print a text in one line, without line breaks of ours: paths and commands can be copied."""
    (err_console if err else out_console).print(printable(text), style=style, soft_wrap=True)


def print_page(lines: Iterable[str]) -> None:
    """Print the lines of a page, each as `wrapped` has it."""
    for line in lines:
        for part in wrapped(line).split("\n"):
            say(part)


def wrapped(line: str) -> str:
    """A line as it fits the terminal, if it is for one.

    Its continuation is indented more than the beginning of any line: a text that is as wide as the terminal
    cannot look like a line of its own.
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
        title: of the table.
        scored: whose model the scores are of: by site, or ``"test"`` and ``"unseen"`` for these groups.
    """
    from medfedaug.metrics.registry import find_metric  # which imports NumPy

    metrics = list(scores["mean"])
    units = {entry.get("unit") for entry in scores["sites"].values()} - {None}
    heads = [
        f"{name} ({', '.join(sorted(units))})" if find_metric(name).has_unit and units else name
        for name in metrics
    ]
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
    for site, reason in without_score(scores).items():
        say(f"{site}: no score: {reason}")


def without_score(scores: Mapping[str, Any]) -> dict[str, str]:
    """Return the reasons why tested sites have no score, by site."""
    first = next(iter(scores["mean"]), "")
    entries = {**scores.get("sites", {}), **scores.get("unseen", {})}
    return {s: e["note"] for s, e in sorted(entries.items()) if e.get("note") and e.get(first) is None}


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
