"""`summary_table`: test scores by method and site, as Markdown, CSV, LaTeX or on the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from medfedaug.analysis.runs import BASELINE, Run, group_runs
from medfedaug.analysis.significance import PairedTest, paired_t_test

__all__ = ["Row", "Score", "Table", "summary_table"]

MIN_SEEDS = 3  # two pairs leave one degree of freedom, and an interval that says nothing


@dataclass(frozen=True)
class Score:
    """One cell: the score of one run, or mean and standard deviation (n - 1) over several."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        """Mean over the runs; ``None`` where nothing could be scored."""
        return fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Standard deviation over the runs; ``None`` for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        if self.mean is None:
            return "–"
        return f"{self.mean:.3f}" if self.std is None else f"{self.mean:.3f} ± {self.std:.3f}"


@dataclass(frozen=True)
class Row:
    """The scores of one method.

    Attributes:
        label: the methods.
        seeds: seeds of its runs.
        sites: score by site, unseen sites included.
        mean: mean over the training sites, as the runs report it.
        test: comparison of ``mean`` with FedAvg's, where there are enough common seeds.
    """

    label: str
    seeds: tuple[int, ...]
    sites: dict[str, Score]
    mean: Score
    test: PairedTest | None = None


@dataclass(frozen=True)
class Table:
    """Test scores, one row a method.

    Attributes:
        metric: name of the score.
        sites: the training sites.
        unseen: sites that trained in none of the runs.
        rows: one a method, FedAvg first.
        notes: what a reader must know to read the numbers.
    """

    metric: str
    sites: tuple[str, ...]
    unseen: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def header(self) -> list[str]:
        """Headings of the columns."""
        compared = [f"Δ to {BASELINE} [95% CI]", "p"] if self._compared else []
        return ["method", *self.sites, *(f"{s} †" for s in self.unseen), "mean", "runs", *compared]

    @property
    def body(self) -> list[list[str]]:
        """The cells as text."""
        lines = []
        for row in self.rows:
            scores = [str(row.sites.get(site, Score(()))) for site in (*self.sites, *self.unseen)]
            line = [row.label, *scores, str(row.mean), str(len(row.seeds))]
            if self._compared and row.test:
                t = row.test
                p = "<0.001" if t.p < 0.001 else f"{t.p:.3f}"
                line += [f"{t.difference:+.3f} [{t.low:+.3f}, {t.high:+.3f}]", p]
            elif self._compared:
                line += ["", ""]
            lines.append(line)
        return lines

    @property
    def _compared(self) -> bool:
        return any(row.test for row in self.rows)

    def markdown(self) -> str:
        """A Markdown table with its notes."""
        header, *lines = ([_markdown(cell) for cell in line] for line in (self.header, *self.body))
        rule = ["---"] + ["---:"] * (len(header) - 1)
        text = "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))
        return text + "".join(f"\n\n{_markdown(note)}" for note in self.notes) + "\n"

    def csv(self) -> str:
        """Full precision, mean and standard deviation in columns of their own; an empty cell for no value."""
        columns = [*self.sites, *self.unseen, "mean"]
        compared = ["difference", "low", "high", "p"] if self._compared else []
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        pairs = [name for column in columns for name in (column, f"{column}_std")]
        writer.writerow(["method", "seeds", *pairs, *compared])
        for row in self.rows:
            scores = [*(row.sites.get(site, Score(())) for site in columns[:-1]), row.mean]
            values = [value for score in scores for value in (score.mean, score.std)]
            tested = [getattr(row.test, name) if row.test else None for name in compared]
            writer.writerow([row.label, " ".join(map(str, row.seeds)), *values, *tested])
        return stream.getvalue()

    def latex(self) -> str:
        """A ``tabular`` for the ``booktabs`` package."""

        def line(cells: Sequence[str]) -> str:
            return "  " + " & ".join(_latex(cell) for cell in cells) + r" \\"

        columns = "l" + "r" * (len(self.header) - 1)
        return "\n".join(
            [
                *(f"% {note}" for note in self.notes),
                rf"\begin{{tabular}}{{{columns}}}",
                r"  \toprule",
                line(self.header),
                r"  \midrule",
                *(line(cells) for cells in self.body),
                r"  \bottomrule",
                r"\end{tabular}",
                "",
            ]
        )

    def rich(self) -> RichTable:
        """For ``rich.print``; a `Table` can also be printed by Rich as it is."""
        # `Text`, since a site's name in brackets would otherwise be read as markup.
        lines = [[cell.replace("± ", "±") for cell in line] for line in (self.header, *self.body)]
        columns = list(zip(*lines, strict=True))
        table = RichTable(
            caption=Text("\n".join(self.notes)),
            caption_justify="left",
            box=SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        for index, cells in enumerate(columns):
            # Cells may wrap between words in a narrow terminal; a number is never cut.
            widest = max(len(word) for cell in cells for word in cell.split() or [""])
            table.add_column(Text(cells[0]), justify="right" if index else "left", min_width=widest)
        for line in lines[1:]:
            table.add_row(*(Text(cell) for cell in line))
        return table

    def __rich__(self) -> RichTable:
        return self.rich()


def summary_table(runs: Sequence[Run]) -> Table:
    """Test scores by method and site.

    Runs that differ by seed alone share a row (mean ± standard deviation). With three or more seeds in
    common, a row's mean is compared with that of FedAvg under otherwise equal settings: mean difference, its
    95% confidence interval and the p-value of a two-sided paired t-test, uncorrected for the number of rows.

    Args:
        runs: finished runs of one metric.

    Raises:
        ConfigError: for no run, for different metrics, or for one experiment given twice.
    """
    groups = group_runs(runs)
    sites = tuple(sorted({site for run in runs for site in run.sites}))
    unseen = tuple(sorted({site for run in runs for site in run.unseen} - set(sites)))
    baselines = [group for group in groups.values() if group[0].methods == (BASELINE,)]
    rows = []
    for label, members in groups.items():
        scores = {
            site: Score(_known([{**run.unseen, **run.sites}.get(site) for run in members]))
            for site in (*sites, *unseen)
        }
        partner = next((b for b in baselines if _comparable(b[0], members[0])), None)
        test = _compare(members, partner) if partner and partner is not members else None
        mean = Score(_known([run.mean for run in members]))
        rows.append(Row(label, tuple(run.seed for run in members), scores, mean, test))
    return Table(runs[0].metric, sites, unseen, tuple(rows), _notes(runs, rows, unseen))


def _known(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _comparable(baseline: Run, run: Run) -> bool:
    """Whether two runs differ by their methods and, maybe, their seeds alone."""

    def settings(r: Run) -> dict[str, object]:
        rest = {key: value for key, value in r.config.items() if key not in ("methods", "seed", "threads")}
        return {**rest, "data": r.context.get("data")}

    return settings(baseline) == settings(run)


def _compare(runs: Sequence[Run], baseline: Sequence[Run]) -> PairedTest | None:
    ours, theirs = ({run.seed: run.mean for run in group} for group in (runs, baseline))
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < MIN_SEEDS:
        return None
    return paired_t_test([a for a, _ in known], [b for _, b in known])


def _notes(runs: Sequence[Run], rows: Sequence[Row], unseen: Sequence[str]) -> tuple[str, ...]:
    name = runs[0].metric.capitalize()
    notes = [f"{name} on the test cases; the mean is over the training sites, unweighted."]
    if unseen:
        notes[0] += " † Unseen: did not train, not in the mean."
    counts = {site: n for run in runs for site, n in run.cases.items()}
    if counts:
        notes.append("Test cases: " + ", ".join(f"{site} {n}" for site, n in sorted(counts.items())) + ".")
    if any(row.test for row in rows):
        notes.append(
            f"Δ and p: paired t-test of the mean against {BASELINE} over common seeds, two-sided, not "
            "corrected for the number of rows. It covers the training's randomness, not the patients' choice."
        )
    elif len(rows) > 1:
        notes.append(
            f"Fewer than {MIN_SEEDS} common seeds with {BASELINE}: differences may be chance, none is tested."
        )
    return tuple(notes)


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _latex(text: str) -> str:
    escapes = {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "Δ": r"$\Delta$",
        "<": r"$<$",
        ">": r"$>$",
        "–": "--",
        "†": r"$\dagger$",
        "\n": " ",
    }
    return "".join(escapes.get(character, character) for character in text)
