"""`class_table`: methods against a reference by class, where sites have annotated different ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from medfedaug.analysis.comparison import (
    UNSEEN,
    Comparison,
    adjusted,
    compared,
    delta,
    difference_cells,
)
from medfedaug.analysis.grouping import group_runs, whole_seeds
from medfedaug.analysis.score_table import Score, annotated_in, cells_note, known_scores
from medfedaug.analysis.text_table import TextTable
from medfedaug.analysis.verdict import rule
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.registry import find_metric
from medfedaug.runs.annotated import BORROWED, OWN
from medfedaug.runs.run import BASELINE, MODEL, Run, compared_metric


@dataclass(frozen=True)
class ClassRow:
    """Scores of one method for one class, at the sites that have it or at those that borrow it.

    Attributes:
        label: the methods.
        name: the class.
        kind: `medfedaug.runs.annotated.OWN` or `BORROWED`.
        sites: those with a score.
        mean: mean over these sites, by seed.
        found: the comparison with the reference; ``None`` of the reference itself.
        model: whose model the scores are of.
    """

    label: str
    name: str
    kind: str
    sites: tuple[str, ...]
    mean: Score
    found: Comparison | None
    model: str

    @property
    def verdict(self) -> str:
        """The verdict as text; empty where nothing is compared."""
        return str((self.found.verdict if self.found else None) or "")


@dataclass(frozen=True)
class ClassTable(TextTable):
    """Methods against the reference by class and by what sites have annotated.

    Attributes:
        rows: one per class, kind of site and method.
        notes: notes that a reader needs to understand the numbers.
        reduced: see `medfedaug.analysis.text_table.TextTable`.
        reference: the methods that all others are compared with.
    """

    rows: tuple[ClassRow, ...]
    notes: tuple[str, ...] = ()
    reduced: str = ""
    reference: str = BASELINE

    @property
    def header(self) -> list[str]:
        """Headings of the columns."""
        difference, verdict = ([delta(self.reference)], ["verdict"]) if self._compared else ([], [])
        return ["method", "class", "annotated", "mean", *difference, "sites", MODEL, *verdict]

    @property
    def _compared(self) -> bool:
        return any(row.found for row in self.rows)

    @property
    def body(self) -> list[list[str]]:
        """The cells as text."""
        return [
            [
                row.label,
                row.name,
                row.kind,
                str(row.mean),
                *([_difference(row.found)] if self._compared else []),
                ", ".join(row.sites),
                row.model,
                *([row.verdict] if self._compared else []),
            ]
            for row in self.rows
        ]

    def records(self) -> list[dict[str, Any]]:
        """Every number in a column of its own."""
        records = []
        for row in self.rows:
            test = row.found.seeds if row.found else None
            record: dict[str, Any] = {"method": row.label, "class": row.name, "annotated": row.kind}
            record |= {"model": row.model, "sites": " ".join(row.sites)}
            record |= {"mean": row.mean.mean, "mean_std": row.mean.std}
            record["difference"] = row.found.difference if row.found else None
            record |= {name: getattr(test, name, None) for name in ("low", "high", "p")}
            record["patients"] = row.found.num_patients if row.found else None
            records.append({**record, "verdict": row.verdict})
        return records


def class_table(runs: Sequence[Run], reference: str = BASELINE) -> ClassTable:
    """Compare methods by class, at sites that annotated it for training and, apart, at those that borrow it.

    Each comparison and its verdict are those of `medfedaug.analysis.comparison.compare_groups`, of one class
    at some of the sites; the p-values of the whole table are adjusted together.

    Args:
        runs: finished runs of one metric.
        reference: the methods that all others are compared with, joined by commas.

    Returns:
        The table; without rows where every site has annotated every class.
    """
    groups = group_runs(runs)
    if not any(annotated_in(run).sites for run in runs):
        return ClassTable((), reference=reference)
    rows: list[ClassRow] = []
    for name in dict.fromkeys(name for run in runs for name in run.classes):
        for kind in (OWN, BORROWED):
            cells = {label: [_cells(run, name, kind) for run in members] for label, members in groups.items()}
            pooled, _ = whole_seeds(cells)
            comparisons = {c.label: c for c in compared(cells, reference) if c.where != UNSEEN}
            for label, members in cells.items():
                mean = Score(known_scores([seed.mean for seed in pooled[label] if not seed.untested]))
                if not mean.values:
                    continue
                sites = tuple(sorted({site for run in members for site in _scored(run)}))
                found = comparisons.get(label)
                rows.append(ClassRow(label, name, kind, sites, mean, found, members[0].model))
    judged = iter(adjusted([row.found for row in rows if row.found]))
    rows = [replace(row, found=next(judged)) if row.found else row for row in rows]
    return ClassTable(tuple(rows), tuple(_notes(runs, rows, reference)), reference=reference)


def _cells(run: Run, name: str, kind: str) -> Run:
    """The run by one class, at the sites where the class is of a kind."""
    known, one = annotated_in(run), run.scored_by(run.metric, name)

    def chosen(scores: dict[str, Any]) -> dict[str, Any]:
        return {site: score for site, score in scores.items() if known.kind(site, name) == kind}

    sites = chosen(one.sites)
    return replace(
        one,
        sites=sites,
        unseen=chosen(one.unseen),
        case_scores=chosen(one.case_scores),
        mean=mean_score(sites.values()),
    )


def _scored(run: Run) -> list[str]:
    """The sites that a mean is over."""
    scores = {**run.unseen, **run.sites}
    return [site for site in run.tested if scores.get(site) is not None]


def _difference(found: Comparison | None) -> str:
    if found is None or found.difference is None:
        return ""
    return difference_cells(found.seeds)[0] or f"{found.difference:+.3f}"


def _notes(runs: Sequence[Run], rows: Sequence[ClassRow], reference: str) -> Iterator[str]:
    title = find_metric(runs[0].metric).title
    yield (
        f"{title} of a class: own, at the sites that outlined it for training; borrowed, at sites that "
        "learned it from others alone and outlined it in test cases. Where no test case shows a borrowed "
        "class, nobody knows its score."
    )
    yield from cells_note(runs)
    if any(row.verdict for row in rows):
        yield (
            rule(reference, compared_metric(runs).cases) + " The table's rows of all classes count together."
        )
