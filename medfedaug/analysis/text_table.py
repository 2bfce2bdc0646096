"""`TextTable`: one table as Markdown, CSV or on the terminal."""

import csv
import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from medfedaug.utils.files import write_text
from medfedaug.utils.printable import printable, printable_values


@dataclass(frozen=True)
class TextTable:
    """A table of text with names in the first column and numbers in the others, and its notes."""

    header: Sequence[str]  # headings of the columns
    body: Sequence[Sequence[str]]  # the cells as text
    # The rows in full precision, with the columns of `csv`; a missing value is `None`.
    records: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...] = ()  # notes that a reader needs, of one or two sentences each
    optional: frozenset[str] = frozenset()  # headings of columns that a narrow terminal leaves out
    rows: tuple[Any, ...] = ()  # what the lines show, for sentences about them

    def cells(self) -> list[list[str]]:
        """Return heading and rows as printable text: names come from sites."""
        return [[printable(cell) for cell in line] for line in (self.header, *self.body)]

    def markdown(self) -> str:
        """Return a Markdown table with its notes."""
        header, *lines = ([_markdown(cell) for cell in line] for line in self.cells())
        rule = ["---"] + ["---:"] * (len(header) - 1)
        text = "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))
        return text + "".join(f"\n\n{_markdown(note)}" for note in self.notes) + "\n"

    def csv(self) -> str:
        """Return CSV in full precision, with every number in its own column and missing values empty."""
        records = [printable_values(record) for record in self.records]
        stream = io.StringIO()
        writer = csv.DictWriter(stream, list(records[0]) if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return stream.getvalue()

    def save(self, stem: str | Path) -> None:
        """Write ``stem.md`` and ``stem.csv``."""
        write_text(f"{stem}.md", self.markdown())
        write_text(f"{stem}.csv", self.csv())

    def rich(self, without: Collection[str] = ()) -> RichTable:
        """Return a table for ``rich.print``. Rich can also print this object directly."""
        # `Text`, since Rich would read a site's name in brackets as markup.
        lines = [[cell.replace("± ", "±") for cell in line] for line in self.cells()]
        kept = [index for index, cell in enumerate(self.header) if cell not in without]
        table = RichTable(
            caption=Text("\n".join(map(printable, self.notes))),
            caption_justify="left",
            box=SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        for index in kept:
            cells = [line[index] for line in lines]
            table.add_column(
                Text(cells[0]),
                justify="right" if index else "left",
                min_width=max(len(word) for cell in cells for word in cell.split() or [""]),
                max_width=max(map(len, cells)),
            )
        for line in lines[1:]:
            table.add_row(*(Text(line[index]) for index in kept))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Leave out optional columns, and wrap cells between words, if the terminal is narrow."""
        unlimited = options.update(max_width=10_000)
        for without in (frozenset[str](), self.optional):
            table = self.rich(without)
            spare = options.max_width - Measurement.get(console, unlimited, table).minimum
            if spare >= 0:
                break
        if spare >= 0:
            _set_widths(table, spare)
        yield table


def _set_widths(table: RichTable, spare: int) -> None:
    """Share the characters that columns of their longest words leave among those that lack most.

    Rich would narrow columns without regard to words, and cut the last ones.
    """
    for column in table.columns:
        column.width = column.min_width
    lacking = {index: (c.max_width or 0) - (c.width or 0) for index, c in enumerate(table.columns)}
    for _ in range(min(spare, sum(lacking.values()))):
        index = max(lacking, key=lambda index: lacking[index])
        lacking[index] -= 1
        table.columns[index].width = (table.columns[index].width or 0) + 1


def number(value: float | None, digits: int = 3) -> str:
    """Return a cell with a number, or a dash without one."""
    return "–" if value is None else f"{value:.{digits}f}"


def plain_markdown(text: str, marks: str) -> str:
    """Return Markdown that renders a text literally, in one line and without a link."""
    text = printable(text)
    for mark in marks:
        text = text.replace(mark, f"\\{mark}")
    return re.sub(r"://|(?i:(?<=www)\.)", lambda match: "\\".join(["", *match.group()]), text)


def _markdown(text: str) -> str:
    # Escapes what breaks a table; brackets of intervals and underscores of names stay readable.
    return plain_markdown(text, "\\|<`").replace("](", "]\\(").replace("][", "]\\[")
