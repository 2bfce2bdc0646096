"""Numbers that the papers print, for comparison with ours.

This folder has one CSV file per data set, with one line per row of a paper's table:

============== =========================================================================================
``protocol``   the preset that the row is compared with
``paper``      ``FedFA``, ``FedFA+``, ``FedRDN``, ``FedFD-A`` or ``FRAug``
``table``      number of the table, or the section whose text has the number
``row``        label of the row as printed; where methods are columns, the row's and the column's
``methods``    the combination, as ``--methods`` takes it
``settings``   differences from the protocol, as ``--set`` takes them
``held_out``   ``yes`` where each site's score is that of the run without this site
a site's name  score at this site, in per cent as printed, ``90.40 ± 0.97`` where the paper has a spread
``mean``       the paper's average over the sites
``note``       remark for the reader
============== =========================================================================================

A number that a paper or its successor prints again is listed once, with the sites' scores.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from medfedaug.research.papers.axes import parse_axis, shown, split_values
from medfedaug.research.papers.presets import Preset

_NO_SITES = {"protocol", "paper", "table", "row", "methods", "settings", "held_out"}
_NO_SITES |= {"mean", "note"}


@dataclass(frozen=True)
class PrintedScore:
    """A score as a share of 1, and its standard deviation over the paper's seeds, if printed."""

    score: float
    spread: float | None = None


@dataclass(frozen=True)
class Published:
    """Row of a paper's table, as in the files; ``source`` is paper and table."""

    protocol: str
    methods: str
    source: str
    row: str
    sites: Mapping[str, PrintedScore]
    mean: PrintedScore | None
    settings: str = ""
    held_out: bool = False
    note: str = ""

    @property
    def variant(self) -> str:
        """Return the settings as `medfedaug.research.sweeps.run_list` names them."""
        axes = [parse_axis(text) for text in split_values(self.settings) if text]
        return ",".join(f"{axis.name}={shown(value)}" for axis in axes for value in axis.values)


def published_rows(preset: Preset) -> tuple[Published, ...]:
    """Return the published rows for a preset."""
    return tuple(row for row in _of_benchmark(preset.benchmark) if row.protocol == preset.name)


@cache
def _of_benchmark(benchmark: str) -> tuple[Published, ...]:
    path = resources.files(__name__) / f"{benchmark}.csv"
    return parse_published(path.read_text(encoding="utf-8")) if path.is_file() else ()


def parse_published(text: str) -> tuple[Published, ...]:
    """Read the rows of a file."""
    return tuple(map(_row, csv.DictReader(text.splitlines())))


def _row(cells: Mapping[str, str]) -> Published:
    sites = [name for name in cells if name not in _NO_SITES]
    table = cells["table"]
    return Published(
        protocol=cells["protocol"],
        methods=cells["methods"],
        source=f"{cells['paper']} {f'Table {table}' if table.isdigit() else table}",
        row=cells["row"],
        sites={site: score for site in sites if (score := _score(cells[site])) is not None},
        mean=_score(cells["mean"]),
        settings=cells["settings"],
        held_out=cells["held_out"] == "yes",
        note=cells["note"],
    )


def _score(text: str) -> PrintedScore | None:
    if not text:
        return None
    score, *spread = (float(number) / 100 for number in text.split(" ± "))
    return PrintedScore(score, *spread)
