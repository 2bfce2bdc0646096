"""`RecordedRun`: the record of a finished run and the file of its model, without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, config_errors
from medfedaug.federation.job_folder import (
    FINAL_MODEL,
    GLOBAL_MODEL,
    HASHES,
    REPORT,
    RESULTS,
    STATISTICS,
    check_unchanged,
    exchange_file,
)
from medfedaug.runs.load_results import read_record
from medfedaug.utils.files import sha256
from medfedaug.utils.printable import counted, html_table, printable
from medfedaug.utils.structure import entries
from medfedaug.utils.validation import is_number

if TYPE_CHECKING:
    from typing_extensions import Self

    from medfedaug.statistics import ChannelStatistics

_MOST_SHOWN = 16  # rows and columns of a screen


@dataclass(frozen=True, eq=False, repr=False)
class RecordedRun(Mapping[str, Any]):
    """A model of a finished run and its record; a mapping of its ``results.json``."""

    model: Path
    record: dict[str, Any]

    @classmethod
    def open(cls, model: str | Path) -> Self:
        """Read a run's record, and check by their hashes that its files belong to it.

        ``model`` is the folder of a run, for its ``global_model.pt``, or a model of it.
        """
        path = Path(model)
        file = path / GLOBAL_MODEL if path.is_dir() else path
        results = file.parent / RESULTS
        if not file.exists() and not results.exists():
            raise ConfigError(
                f"{path}: no finished run; name the folder of one, in which are {GLOBAL_MODEL} and {RESULTS}"
            )

        def usable(record: dict[str, Any]) -> RunConfig:
            entries({}, needed=("run", HASHES))(record, "")
            return cls(file, record).config

        record = read_record(results, usable)
        check_unchanged(file, record)
        if (exchange := exchange_file(file)).exists():
            check_unchanged(exchange, record)
        return cls(file, record)

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Open the run in a folder, with its last model where none was selected (local training)."""
        return cls.open(folder if (folder / GLOBAL_MODEL).exists() else folder / FINAL_MODEL)

    @cached_property
    def config(self) -> RunConfig:
        """The run's settings, without limit and held-out sites."""
        return RunConfig.from_dict({**self.record["config"], "limit": None, "holdout": []})

    @property
    def round(self) -> int:
        """The round of the model."""
        last = self.model.name == FINAL_MODEL
        return len(self.record["rounds"]) if last else int(self.record["selected_round"])

    @cached_property
    def sha256(self) -> str:
        """The hash of the model's file."""
        return sha256(self.model)

    @cached_property
    def statistics(self) -> dict[str, ChannelStatistics]:
        """The pair of each site that sent one (FedRDN), by the site's name."""
        path = self.model.parent / STATISTICS
        if not path.exists():
            return {}
        check_unchanged(path, self.record)
        from medfedaug.statistics import load_statistics  # and with it PyTorch

        with config_errors("the run's statistics", ValueError):
            return load_statistics(path)

    @property
    def results(self) -> dict[str, Any]:
        """The content of ``results.json``: settings, rounds, test scores."""
        return _Results(self.record)

    def __getitem__(self, name: str) -> Any:
        return self.record[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)

    @property
    def scores(self) -> dict[str, dict[str, float | None]]:
        """Test scores by site and metric, ``"mean"`` last; empty where nothing was tested."""
        rows = self.test_table()
        return {row["site"]: {k: v for k, v in row.items() if k not in ("site", "trained")} for row in rows}

    __hash__ = object.__hash__  # a mapping has none

    def __repr__(self) -> str:
        header, *rows = self._screen()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (header, *rows)]
        return "\n".join([self._headline, *(lines if rows else [])])

    def _repr_html_(self) -> str:
        """Return the scores by site as a table, for a notebook."""
        header, *rows = self._screen()
        return f"<p>{escape(self._headline)}</p>" + (html_table(header, rows) if rows else "")

    @property
    def _headline(self) -> str:
        methods = ",".join(printable(method["name"]) for method in self.record["config"]["methods"])
        best = f", tested after round {self.best}" if self.best else ""
        rounds = counted(len(self.record["rounds"]), "round")
        return f"{methods}, {rounds}{best}: {printable(str(self.model.parent))}"

    def _screen(self) -> list[list[str]]:
        """Return the test scores as text, the heading first; of many sites the first ones and the mean."""
        rows = self.test_table()
        names = [name for name in (rows[0] if rows else ()) if name != "trained"][:_MOST_SHOWN]
        shown = rows if len(rows) <= _MOST_SHOWN else [*rows[: _MOST_SHOWN - 1], rows[-1]]
        cells = [[_cell(row[name]) for name in names] for row in shown]
        if left := len(rows) - len(shown):
            cells.insert(-1, [f"and {left} more", *[""] * (len(names) - 1)])
        return [names, *cells]

    @property
    def best(self) -> int | None:
        """The best round on the validation cases, whose model was tested; ``None`` for local models."""
        return self.record.get("selected_round")

    @property
    def report(self) -> Path:
        """The run's page; `medfedaug.analysis.write_report` makes further ones, also of several runs."""
        return self.model.parent / REPORT

    def test_table(self) -> list[dict[str, Any]]:
        """Test scores as rows, ready for ``pandas.DataFrame``: one for each site, and one for their mean.

        The columns are ``site``, ``trained`` (``None`` in the row of the mean), and each metric.
        """
        test = self.record.get("test", {})
        mean = test.get("mean", {})
        rows = [
            {"site": site, "trained": group == "sites", **{name: scores.get(name) for name in mean}}
            for group in ("sites", "unseen")
            for site, scores in test.get(group, {}).items()
        ]
        return [*rows, {"site": "mean", "trained": None, **mean}] if rows else []


class _Results(dict[str, Any]):
    """A record whose text is one line: a notebook prints the last value of a cell."""

    def __repr__(self) -> str:
        return f"<results.json: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        """Return the entries as a table, for a notebook: values, and the sizes of lists and objects."""
        sizes = {
            k: counted(len(v), "entry", "entries") for k, v in self.items() if isinstance(v, list | dict)
        }
        return html_table(["results.json", ""], [[k, sizes.get(k, str(v))] for k, v in self.items()])


def _cell(value: Any) -> str:
    return f"{value:.3f}" if is_number(value) else "–" if value is None else printable(str(value))
