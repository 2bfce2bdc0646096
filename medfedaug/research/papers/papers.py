"""The papers' tables and figures by name (``papers.yml``), with their comparisons and protocols.

>>> entry = find_entry("fedfa+:table11")
>>> [(comparison.methods, comparison.axes) for comparison in entry.comparisons("office_caltech_10")]
[(('fedfa',), ()), (('fedfa',), (Axis(name='fedfa.variance', values=('direct',)),))]
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from medfedaug.errors import ConfigError
from medfedaug.research.papers.axes import Axis, Comparison, axis_value, parse_axis, split_values
from medfedaug.research.papers.presets import PRESETS
from medfedaug.research.papers.published import Published, published_rows
from medfedaug.utils.validation import check_choice

_FILE = "papers.yml"


@dataclass(frozen=True)
class Entry:
    """Table, figure or section of a paper."""

    name: str  # the NAME of `medfedaug benchmark NAME`, such as "fedfa+:table10"
    source: str  # paper and table, as `Published` has them
    title: str  # its subject, in a few words
    reason: str = ""  # why it cannot run; empty if it can
    like: str = ""  # name of an entry whose runs belong to this one, too
    # `protocols`, `methods` and `vary`, settings with one or several values in turn.
    runs: Sequence[Mapping[str, Any]] = ()
    # Assumptions, and rows that are left out, with the reason.
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def published(self) -> tuple[Published, ...]:
        """Return the printed rows of this entry and of the entry in ``like``."""
        more = find_entry(self.like).published if self.like else ()
        return (*_published().get(self.source, ()), *more)

    @property
    def protocols(self) -> list[str]:
        """List the protocols of its runs; none if it cannot run."""
        named = [name for runs in self._runs() for name in runs["protocols"]]
        return list(dict.fromkeys([*named, *(row.protocol for row in self.published)]))

    def comparisons(self, protocol: str) -> list[Comparison]:
        """List the methods and settings that it compares in a protocol."""
        comparisons = []
        for runs in self._runs():
            if protocol in runs["protocols"]:
                axes = [Axis(name, tuple(map(axis_value, _several(v)))) for name, v in runs["vary"].items()]
                comparisons.append(Comparison(tuple(_several(runs["methods"])), tuple(axes)))
        by_settings: dict[str, list[str]] = {}
        for row in self.published:
            if row.protocol == protocol:
                by_settings.setdefault(row.settings, []).append(row.methods)
        for settings, methods in by_settings.items():
            axes = [parse_axis(text) for text in split_values(settings) if text]
            comparisons.append(Comparison(tuple(dict.fromkeys(methods)), tuple(axes)))
        return comparisons

    def experiment(self, protocol: str = "") -> dict[str, Any]:
        """Return the fields of its `medfedaug.research.sweeps.experiment.Experiment`.

        Args:
            protocol: one of its protocols; optional if it has only one.
        """
        if self.reason:
            raise ConfigError(f"{self.name} cannot be run: {self.reason}")
        protocol = protocol or (self.protocols[0] if len(self.protocols) == 1 else "")
        if protocol not in self.protocols:
            raise ConfigError(f"{self.name} has the protocols {', '.join(self.protocols)}, not {protocol!r}")
        rows = [row for row in self.published if row.protocol == protocol]
        held_out = any(row.held_out for row in rows) and not PRESETS[protocol].holdout
        methods = [name for comparison in self.comparisons(protocol) for name in comparison.methods]
        return {
            "protocol": protocol,
            "methods": list(dict.fromkeys(methods)),
            "holdout": ["all"] if held_out else [],
        }

    def _runs(self) -> list[Mapping[str, Any]]:
        return [*self.runs, *(find_entry(self.like)._runs() if self.like else ())]


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@cache
def _published() -> dict[str, tuple[Published, ...]]:
    rows: dict[str, tuple[Published, ...]] = {}
    for preset in PRESETS.values():
        for row in published_rows(preset):
            rows[row.source] = (*rows.get(row.source, ()), row)
    return rows


@cache
def entries() -> dict[str, Entry]:
    """Read all entries by name, paper by paper."""
    content = yaml.safe_load((resources.files(__package__) / _FILE).read_text(encoding="utf-8"))
    result = {}
    for paper, places in content.items():
        for place, values in places.items():
            name = f"{paper.lower().replace('-', '_')}:{place}"
            runs = [{"vary": {}, **run} for run in values.get("runs", ())]
            source = f"{paper} {re.sub(r'(?<=[a-z])(?=[0-9])', ' ', place).capitalize()}"
            result[name] = Entry(name, source, **{**values, "runs": runs})
    return result


def find_entry(name: str) -> Entry:
    """Return the entry of a name."""
    check_choice("entry", name, entries())
    return entries()[name]
