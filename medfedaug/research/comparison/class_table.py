"""`class_table`: methods against a reference by class, where sites have annotated different ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from medfedaug.analysis.grouping import group_runs, whole_seeds
from medfedaug.analysis.score_table import Score, annotated_in, cells_note, delta, difference_cells
from medfedaug.analysis.text_table import TextTable
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.registry import find_metric
from medfedaug.research.comparison.comparison import (
    UNSEEN,
    Comparison,
    adjusted,
    compared,
)
from medfedaug.research.comparison.verdict import rule
from medfedaug.runs.annotated import BORROWED, OWN
from medfedaug.runs.run import BASELINE, MODEL, Run, compared_metric


@dataclass(frozen=True)
class ClassRow:
    """Scores of one method for one class, at the sites that have it or borrow it.

    Attributes:
        name: the class.
        kind: `medfedaug.runs.annotated.OWN` or `BORROWED`.
        sites: the sites with a score.
        mean: mean over these sites, by seed.
        comparison: the comparison with the reference; ``None`` for the reference itself.
        model: owner of the model behind the scores.
    """

    label: str
    name: str
    kind: str
    sites: tuple[str, ...]
    mean: Score
    comparison: Comparison | None
    model: str

    @property
    def verdict(self) -> str:
        """The verdict as text; empty without a comparison."""
        return str((self.comparison.verdict if self.comparison else None) or "")


@dataclass(frozen=True)
class ClassTable(TextTable):
    """Methods against the reference by class and by the sites' annotation, one row for each.

    Attributes:
        reference: the methods that all others are compared with.
    """

    rows: tuple[ClassRow, ...]
    notes: tuple[str, ...] = ()
    reduced: str = ""
    reference: str = BASELINE

    @property
    def header(self) -> list[str]:
        difference, verdict = ([delta(self.reference)], ["verdict"]) if self._compared else ([], [])
        return ["method", "class", "annotated", "mean", *difference, "sites", MODEL, *verdict]

    @property
    def _compared(self) -> bool:
        return any(row.comparison for row in self.rows)

    @property
    def body(self) -> list[list[str]]:
        return [
            [
                row.label,
                row.name,
                row.kind,
                str(row.mean),
                *([_difference(row.comparison)] if self._compared else []),
                ", ".join(row.sites),
                row.model,
                *([row.verdict] if self._compared else []),
            ]
            for row in self.rows
        ]

    def records(self) -> list[dict[str, Any]]:
        records = []
        for row in self.rows:
            test = row.comparison.seeds if row.comparison else None
            record: dict[str, Any] = {"method": row.label, "class": row.name, "annotated": row.kind}
            record |= {"model": row.model, "sites": " ".join(row.sites)}
            record |= {"mean": row.mean.mean, "mean_std": row.mean.std}
            record["difference"] = row.comparison.difference if row.comparison else None
            record |= {name: getattr(test, name, None) for name in ("low", "high", "p")}
            record["patients"] = row.comparison.num_patients if row.comparison else None
            records.append({**record, "verdict": row.verdict})
        return records


def class_table(runs: Sequence[Run], reference: str = BASELINE) -> ClassTable:
    """Compare methods by class, at sites that annotated it for training and, apart, at sites that borrow it.

    Comparisons and verdicts are as in `medfedaug.research.comparison.comparison.compare_groups`, of one
    class at some of the sites; the p-values of the whole table are adjusted together.

    Returns:
        The table; without rows if every site has annotated every class.
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
                mean = Score.of_means(pooled[label])
                if not mean.values:
                    continue
                sites = {
                    site
                    for run in members
                    for site in run.tested
                    if {**run.unseen, **run.sites}.get(site) is not None
                }
                rows.append(
                    ClassRow(
                        label,
                        name,
                        kind,
                        tuple(sorted(sites)),
                        mean,
                        comparisons.get(label),
                        members[0].model,
                    )
                )
    judged = iter(adjusted([row.comparison for row in rows if row.comparison]))
    rows = [replace(row, comparison=next(judged)) if row.comparison else row for row in rows]
    return ClassTable(tuple(rows), tuple(_notes(runs, rows, reference)), reference=reference)


def _cells(run: Run, name: str, kind: str) -> Run:
    """Return the scores of one class of a run, at the sites that have the class as `kind`."""
    annotated, by_class = annotated_in(run), run.scored_by(run.metric, name)

    def of_kind(scores: dict[str, Any]) -> dict[str, Any]:
        return {site: score for site, score in scores.items() if annotated.kind(site, name) == kind}

    sites = of_kind(by_class.sites)
    return replace(
        by_class,
        sites=sites,
        unseen=of_kind(by_class.unseen),
        case_scores=of_kind(by_class.case_scores),
        mean=mean_score(sites.values()),
    )


def _difference(comparison: Comparison | None) -> str:
    if comparison is None or comparison.difference is None:
        return ""
    return difference_cells(comparison.seeds)[0] or f"{comparison.difference:+.3f}"


def _notes(runs: Sequence[Run], rows: Sequence[ClassRow], reference: str) -> Iterator[str]:
    title = find_metric(runs[0].metric).title
    yield (
        f"{title} of a class: own, at the sites that outlined it for training; borrowed, at sites that "
        "learned it from others alone and outlined it in test cases. If no test case shows a borrowed class, "
        "its score is not known."
    )
    yield from cells_note(runs)
    if any(row.verdict for row in rows):
        yield (
            rule(reference, compared_metric(runs).cases) + " The table's rows of all classes count together."
        )
