"""`metric_table`: every test metric by method: mean, classes, worst site and spread."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from medfedaug.analysis.grouping import Tested, group_runs, units_differ, whole_seeds
from medfedaug.analysis.score_table import Score, cells_note
from medfedaug.analysis.text_table import TextTable, number
from medfedaug.metrics.registry import disparity, find_metric
from medfedaug.runs.run import MODEL, NOT_RECORDED, Run

_MOST_CLASSES = 6  # as columns of text; CSV has them all


@dataclass(frozen=True)
class MetricRow:
    """Scores of one method by one metric."""

    label: str
    metric: str
    title: str
    mean: Score  # mean over the sites that the runs are about; `classes` has it for each class
    classes: dict[str, Score]
    # The site with the worst score, averaged over the seeds; empty if no site has a score, or no seed all
    # folds and sites.
    worst: str
    worst_score: float | None
    # Population standard deviation of the sites' scores, which are averaged over the seeds.
    spread: float | None
    gap: float | None  # the highest of these scores minus the lowest
    # Classes of a seed's test cases that were not predicted at all; `None` if unknown, and for metrics that
    # count them with 0.
    missed: float | None
    model: str = NOT_RECORDED


def metric_table(runs: Sequence[Run]) -> TextTable:
    """Return every metric of the test by method: mean, classes, worst site and disparity between sites.

    Rows and their repetitions are those of `medfedaug.analysis.score_table.summary_table`. A class has no
    scores by case, so that over folds its score is the mean of the folds' scores.
    """
    groups = group_runs(runs)
    _, lacking = whole_seeds(groups)
    rows = [
        row
        for name in dict.fromkeys(name for run in runs for name in run.metrics)
        for row in _rows(
            {label: [run.scored_by(name) for run in members] for label, members in groups.items()}
        )
    ]
    notes = [
        "Mean, worst site and spread over the training sites, or those left out in turn: population standard "
        "deviation of the sites' scores, and the highest minus the lowest."
    ]
    if any(row.missed is not None for row in rows):
        infinite = [find_metric(row.metric).title for row in rows if row.missed is not None]
        notes.append(
            "Missed: classes of a case that were not predicted at all, by seed. Their "
            f"{' or '.join(dict.fromkeys(infinite))} is infinite and enters no mean, so that a method which "
            "misses more may have the smaller one."
        )
    return _table(rows, (*notes, *cells_note(runs), *lacking))


def _table(rows: Sequence[MetricRow], notes: tuple[str, ...]) -> TextTable:
    classes = tuple(dict.fromkeys(name for row in rows for name in row.classes))
    shown = classes if 1 < len(classes) <= _MOST_CLASSES else ()  # a single class is the mean itself
    misses = any(row.missed is not None for row in rows)
    header = ["method", "metric", "mean", *shown, "worst site", "std of sites", "range of sites"]
    body, records = [], []
    for row in rows:
        worst = "–" if row.worst_score is None else f"{row.worst_score:.3f} ({row.worst})"
        line = [row.label, row.title, str(row.mean), *(str(row.classes.get(c, Score())) for c in shown)]
        line += [worst, number(row.spread), number(row.gap)]
        line += ["" if row.missed is None else f"{row.missed:g}"] if misses else []
        body.append([*line, row.model])
        record: dict[str, Any] = {"method": row.label, "model": row.model, "metric": row.metric}
        record["title"] = row.title
        scores = {f"class {name}": row.classes.get(name, Score()) for name in classes}
        for name, score in {"mean": row.mean, **scores}.items():
            record |= {name: score.mean, f"{name}_std": score.std}
        names = ("worst", "worst_score", "spread", "gap", "missed")
        records.append(record | {name: getattr(row, name) for name in names})
    header += [*(["missed"] if misses else []), MODEL]
    return TextTable(header, body, records, notes, optional=frozenset(shown), rows=tuple(rows))


def _rows(groups: Mapping[str, Sequence[Run]]) -> list[MetricRow]:
    """Return the rows of one metric, pooled together: a site that is left out in one row belongs to all."""
    pooled, _ = whole_seeds(groups)
    by_class = {
        name: whole_seeds(
            {label: [run.scored_by(run.metric, name) for run in members] for label, members in groups.items()}
        )[0]
        for name in dict.fromkeys(
            name for members in groups.values() for run in members for name in run.classes
        )
    }
    classes = {
        label: {name: Score.of_means(seeds[label]) for name, seeds in by_class.items()} for label in groups
    }
    return [_row(label, members, pooled[label], classes[label]) for label, members in groups.items()]


def _row(
    label: str, members: Sequence[Run], seeds: Sequence[Tested], classes: Mapping[str, Score]
) -> MetricRow:
    metric = find_metric(members[0].metric)
    whole = all(seed.whole for seed in seeds)
    known = {
        site: fmean(values)
        for site in sorted({site for run in members for site in run.tested})
        if (values := [score for seed in seeds if (score := seed.sites.get(site)) is not None])
    }
    if not whole or units_differ(members, known.keys()):
        known = {}
    spread = disparity(known.values()) or {}
    worst = metric.worst(known) if known else ""
    return MetricRow(
        label=label,
        metric=metric.name,
        title=members[0].title,
        mean=Score.of_means(seeds),
        classes={name: score for name, score in classes.items() if score.values},
        worst=worst,
        worst_score=known.get(worst),
        spread=spread.get("std"),
        gap=spread.get("range"),
        missed=_missed(members, {seed.seed for seed in seeds}) if metric.skips_missed and whole else None,
        model=members[0].model,
    )


def _missed(members: Sequence[Run], seeds: Set[int]) -> float | None:
    """Return the classes that the runs of a seed missed together, averaged over the seeds."""
    counts = [
        sum(run.missed.get(site, 0) for run in members if run.seed == seed for site in run.tested)
        for seed in seeds
    ]
    return fmean(counts) if any(run.missed for run in members) else None
