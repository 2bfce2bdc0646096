"""Writes the tables of `docs/papers.md` from the protocols and the papers' entries.

python docs/entries.py

A test compares the page with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path

from medfedaug.experiments.axes import shown
from medfedaug.experiments.papers import Entry, entries
from medfedaug.experiments.presets import PRESETS
from medfedaug.experiments.published import published_rows
from medfedaug.methods.registry import parse_methods

PAGE = Path(__file__).with_name("papers.md")


def runs(entry: Entry, protocol: str) -> int:
    """Count the runs of an entry in a protocol with one seed."""
    found = set()
    for one in entry.comparisons(protocol):
        for text in one.methods:
            parts = {spec["name"] for spec in parse_methods(text)}
            axes = [axis for axis in one.axes if axis.method in ("", *parts)]
            for values in product(*(axis.values for axis in axes)):
                named = zip(axes, values, strict=True)
                found.add((text, *sorted((axis.name, shown(value)) for axis, value in named)))
    rows = [row for row in entry.published if row.protocol == protocol and row.held_out]
    left_out = max((len(row.sites) for row in rows), default=1) if not PRESETS[protocol].holdout else 1
    return len(found) * left_out


def protocol_table() -> Iterator[str]:
    """The protocols, one a line."""
    yield "| NAME | data set | network | rounds x local | published numbers | one run, one core |"
    yield "|---|---|---|---|---|---|"
    for preset in PRESETS.values():
        tables: dict[str, list[str]] = {}
        for row in published_rows(preset):
            paper, _, table = row.source.replace(" Table ", " ").partition(" ")
            tables.setdefault(paper, []).append(table)
        printed = (
            ", ".join(f"{paper} {', '.join(dict.fromkeys(own))}" for paper, own in tables.items()) or "–"
        )
        cells = (preset.benchmark, preset.config["network"], preset.schedule, printed, preset.cost)
        yield f"| `{preset.name}` | {' | '.join(cells)} |"


def entry_tables() -> Iterator[str]:
    """The entries of each paper: a table of those that can be run, and the others with their reasons."""
    for paper, group in groupby(entries().values(), lambda entry: entry.source.split(" ")[0]):
        own = list(group)
        yield from (f"### {paper}", "", "| entry | subject | runs by protocol | published rows | one core |")
        yield "|---|---|---|---|---|"
        for entry in own:
            if not entry.reason:
                number = {protocol: runs(entry, protocol) for protocol in entry.protocols}
                told = ", ".join(f"`{protocol}` {count}" for protocol, count in number.items())
                hours = sum(count * PRESETS[protocol].hours for protocol, count in number.items())
                printed = len(entry.published) or "–"
                yield f"| `{entry.name}` | {entry.title} | {told} | {printed} | {hours:,.0f} h |"
        yield ""
        for entry in own:
            yield from (f"- `{entry.name}`: {note}" for note in entry.notes)
        for reason, those in groupby(sorted(own, key=lambda one: one.reason), lambda one: one.reason):
            if reason:
                yield f"- {', '.join(f'`{one.name}`' for one in those)} cannot be run: {reason}."
        yield ""


def written(text: str) -> str:
    """The page with its tables as they are now."""
    for mark, lines in (("protocols", protocol_table()), ("entries", entry_tables())):
        content = "\n".join(lines).strip()
        text, found = re.subn(
            rf"(<!-- {mark}: .*? -->\n).*?(\n<!-- end -->)",
            lambda place, content=content: f"{place[1]}\n{content}\n{place[2]}",
            text,
            flags=re.DOTALL,
        )
        if found != 1:
            raise ValueError(f"{PAGE.name} has {found} places for {mark}")
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
