"""`summary_table`: test scores by method and site, with the result of the comparison with FedAvg."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from medfedaug.analysis.grouping import Groups, Tested, group_runs, unscored_notes, whole_seeds
from medfedaug.analysis.text_table import TextTable
from medfedaug.data.dataset_json import LABELLED
from medfedaug.metrics.registry import REMEDIES, find_metric, nothing_learned_at
from medfedaug.metrics.significance import PairedTest
from medfedaug.runs.run import BASELINE, MODEL, NOT_RECORDED, OTHER_INPUT, SCALED, Input, Run, compared_metric
from medfedaug.utils.plugins import added_modules
from medfedaug.utils.printable import counted

MOST_SITES = 12  # in text; CSV has all of them
STUDIES = "comparison.patient_table"  # module of a layer that compares runs

RESOLUTION = "could see"
_TESTED = ("low", "high", "p", "detectable")
_COLUMNS = {"method", "model", "seeds", "folds", "held_out", "input", "mean", "difference", "verdict"}
_COLUMNS |= {*_TESTED}


@dataclass(frozen=True)
class Score:
    """Cell of a table: the score of one run, or mean and standard deviation (n - 1) over several."""

    values: tuple[float, ...] = ()

    @classmethod
    def known(cls, values: Iterable[float | None]) -> Score:
        """Build from the values that are not ``None``."""
        return cls(tuple(value for value in values if value is not None))

    @classmethod
    def of_means(cls, seeds: Iterable[Tested]) -> Score:
        """Build from the means of the seeds in which every site was tested."""
        return cls.known(seed.mean for seed in seeds if not seed.untested)

    @property
    def mean(self) -> float | None:
        """Mean over the runs; ``None`` if nothing could be scored."""
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
    """The scores of one method."""

    label: str
    seeds: tuple[int, ...]
    sites: dict[str, Score]  #: score by site, including unseen sites
    mean: Score  #: mean over the training sites, for the seeds in which all of them were tested
    folds: int = 1  #: the number of folds over which the patients of a seed are pooled
    held_out: int = 0  #: the number of sites that were left out in turn
    difference: float | None = None  #: `mean` minus the reference's, over common seeds; `None` without any
    baseline: bool = False  #: marks the reference of other rows
    test: PairedTest | None = None  #: comparison of `mean` with the reference's, with enough common seeds
    verdict: Any = None  #: `medfedaug.research.comparison.verdict.Verdict`; `None` without a reference
    input: Input = SCALED
    other_input: bool = False  #: marks an input that is scaled differently from the reference's
    model: str = NOT_RECORDED  #: owner of the model behind the scores, except at unseen sites

    @property
    def compared(self) -> str:
        """The difference to the reference as text, with its interval if it has one."""
        if self.baseline:
            return "baseline"
        if self.test:
            return difference_cells(self.test)[0]
        return "" if self.difference is None else f"{self.difference:+.3f}"


@dataclass(frozen=True, kw_only=True)
class Table(TextTable):
    """Test scores, one `Row` per method."""

    metric: str
    sites: tuple[str, ...] = ()  #: the training sites, or the sites that were left out in turn
    unseen: tuple[str, ...] = ()  #: sites that trained in none of the runs
    nothing_learned: str = ""  #: the reason why no method learned anything; empty if one did
    reference: str = BASELINE  #: the methods that all others are compared with
    untrained: str = ""  #: a sentence on a reference that learned nothing while another method did


def _lines(
    rows: Sequence[Row], sites: Sequence[str], unseen: Sequence[str], reference: str
) -> tuple[list[str], list[list[str]], frozenset[str]]:
    """Return headings, of which a phone shows only the first ones, cells, and the optional headings."""
    shown = (*sites, *unseen) if len(sites) + len(unseen) <= MOST_SITES else ()
    headings = [f"{site} †" if site in unseen else site for site in shown]
    tested, judged = any(row.test for row in rows), any(row.verdict for row in rows)
    difference = [delta(reference) if tested else f"Δ to {reference}"] if judged else []
    header = ["method", "mean", *difference, *headings, MODEL, "seeds"]
    header += ["p", RESOLUTION] if tested else []
    header += ["verdict"] if judged else []
    body = []
    for row in rows:
        seeds = str(len(row.seeds)) + (f" × {row.folds} folds" if row.folds > 1 else "")
        seeds += f" × {row.held_out} sites" if row.held_out else ""
        line = [marked(row.label, row.other_input), str(row.mean), *([row.compared] if judged else [])]
        line += [*(str(row.sites.get(site, Score())) for site in shown), row.model, seeds]
        line += difference_cells(row.test)[1:] if tested else []
        body.append([*line, str(row.verdict or "")] if judged else line)
    # A model that is the same for all rows is in a note, too.
    alike = [MODEL] if len({row.model for row in rows}) == 1 else []
    return header, body, frozenset([*headings, *alike])


def _records(rows: Sequence[Row], sites: Sequence[str]) -> list[dict[str, Any]]:
    tested, judged = any(row.test for row in rows), any(row.verdict for row in rows)
    records = []
    for row in rows:
        record: dict[str, Any] = {
            "method": row.label,
            "model": row.model,
            "seeds": " ".join(map(str, row.seeds)),
            "folds": row.folds,
            "held_out": row.held_out,
            "input": str(row.input),
        }
        # A site's column is never one of the others.
        columns = {f"site {s}" if s.removesuffix("_std") in _COLUMNS else s: s for s in sites}
        scores = {name: row.sites.get(site, Score()) for name, site in columns.items()}
        for name, score in {"mean": row.mean, **scores}.items():
            record |= {name: score.mean, f"{name}_std": score.std}
        record |= {"difference": row.difference} if judged else {}
        record |= {name: getattr(row.test, name, None) for name in _TESTED} if tested else {}
        records.append(record | ({"verdict": str(row.verdict or "")} if judged else {}))
    return records


def summary_table(runs: Sequence[Run], reference: str = BASELINE) -> Table:
    """Return the test scores by method and site.

    Runs that differ only in the seed share a row (mean ± standard deviation). The folds of a seed are pooled,
    so that every patient counts once. If each site was left out in turn, its score comes from the run without
    it (`medfedaug.analysis.grouping.pool_runs`). With three or more common seeds, a row's mean is compared
    with the reference's under otherwise equal settings: mean difference, its 95% confidence interval,
    the p-value of a two-sided paired t-test, not corrected for the number of rows, and the smallest
    difference that the test would detect (`medfedaug.metrics.significance.detectable_difference`). The
    verdict is that of `medfedaug.research`. The reference is methods, joined by commas.
    """
    groups = group_runs(runs)
    runs = [run for members in groups.values() for run in members]
    sites = tuple(sorted({site for run in runs for site in run.tested}))
    unseen = tuple(sorted({site for run in runs for site in run.unseen} - set(sites)))
    pooled, lacking = whole_seeds(groups)
    notes = [
        f"{label}, {run.name}, trained without {', '.join(sorted(run.left_out))}."
        for label, members in groups.items()
        for run in members
        if run.left_out
    ]
    studies = added_modules(STUDIES)
    compared = {c.label: c for study in studies for c in study.compare(groups, reference)}
    baselines = {comparison.baseline for comparison in compared.values()}
    rows = []
    for label, seeds in pooled.items():
        folds, turn = ({part[k] for seed in seeds for part in seed.parts} for k in (0, 1))
        comparison, run = compared.get(label), groups[label][0]
        baseline = groups[_baseline(compared, groups, label)][0]
        rows.append(
            Row(
                label=label,
                seeds=tuple(seed.seed for seed in seeds),
                sites={
                    site: Score.known({**seed.unseen, **seed.sites}.get(site) for seed in seeds)
                    for site in (*sites, *unseen)
                },
                mean=Score.of_means(seeds),
                folds=len(folds),
                held_out=len(turn) if run.in_turn else 0,
                difference=comparison.difference if comparison else None,
                baseline=label in baselines,
                test=comparison.seeds if comparison else None,
                verdict=comparison.verdict if comparison else None,
                input=run.input,
                other_input=run.input.differs(baseline.input),
                model=run.model,
            )
        )
    reasons = {label: {run.nothing_learned for run in members} for label, members in groups.items()}
    nothing = {label: min(texts) for label, texts in reasons.items() if all(texts)}
    none = next(iter(nothing.values())) if nothing.keys() == groups.keys() else ""
    silent = [] if none else sorted({c.baseline for c in compared.values() if not c.learned} & {*nothing})
    untrained = " ".join(_untrained(label, groups[label], nothing[label]) for label in silent)
    uncompared = f"Nothing was learned: {none}. Hence nothing is compared. {REMEDIES}" if none else untrained
    notes = [
        *input_notes(
            groups, {row.label: _baseline(compared, groups, row.label) for row in rows if row.other_input}
        ),
        *(note for study in studies for note in study.unlike_notes(compared.values())),
        *_notes(runs, rows, unseen, uncompared, reference),
        *notes,
        *cells_note(runs),
        *lacking,
        *unscored_notes(pooled, reference),
    ]
    if not none:
        others = {label: text for label, text in nothing.items() if label not in silent}
        notes += [f"{label} learned nothing: {text}." for label, text in others.items()]
        notes += _at_nothing([row for row in rows if row.label not in nothing], runs[0].metric)
    header, body, optional = _lines(rows, sites, unseen, reference)
    return Table(
        header,
        body,
        _records(rows, (*sites, *unseen)),
        tuple(notes),
        optional=optional,
        rows=tuple(rows),
        metric=runs[0].metric,
        sites=sites,
        unseen=unseen,
        nothing_learned=none,
        reference=reference,
        untrained=untrained,
    )


def _baseline(compared: Mapping[str, Any], groups: Groups, label: str) -> str:
    """Return the reference of a method; the first group where it has none."""
    return compared[label].baseline if label in compared else next(iter(groups))


def delta(reference: str) -> str:
    """Return the heading of the column of differences.

    >>> delta("fedavg")
    'Δ to fedavg [95% CI]'
    """
    return f"Δ to {reference} [95% CI]"


def difference_cells(test: Any) -> list[str]:
    """Return difference with interval, p-value and resolution, as text; empty without a test."""
    if test is None:
        return ["", "", ""]
    p = "<0.001" if test.p < 0.001 else f"{test.p:.3f}"
    return [f"{test.difference:+.3f} [{test.low:+.3f}, {test.high:+.3f}]", p, f"{test.detectable:.3f}"]


def marked(label: str, other_input: bool) -> str:
    """Return a row's label, with a mark if its input was scaled differently."""
    return f"{label} {OTHER_INPUT}" if other_input else label


def input_notes(groups: Groups, baselines: Mapping[str, str]) -> Iterator[str]:
    """Yield notes on methods whose input was scaled differently from their reference's."""
    for baseline in dict.fromkeys(baselines.values()):
        labels = [baseline, *(label for label, reference in baselines.items() if reference == baseline)]
        inputs = "; ".join(f"{label}: {groups[label][0].input}" for label in labels)
        yield (
            f"{OTHER_INPUT} Not the same input as {baseline} ({inputs}): a difference may come of the "
            "scaling and not of the method. Runs that all have --intensity scale, or all raw, differ only by "
            "their methods."
        )


def _untrained(label: str, members: Sequence[Run], reason: str) -> str:
    rounds = counted(max(len(run.rounds) for run in members), "round")
    return f"Train longer: {label} learned nothing in {rounds} ({reason}), and nothing is compared with it."


def _at_nothing(rows: Sequence[Row], metric: str) -> Iterator[str]:
    """Yield a note for each method on the sites at which it learned nothing."""
    for row in rows:
        if found := nothing_learned_at(metric, {site: score.mean for site, score in row.sites.items()}):
            yield f"{row.label} learned nothing at {', '.join(found)}: {find_metric(metric).title} 0.000."


def cells_note(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a note on the cells that a mean is over, if sites have annotated different classes."""
    known = {site: tuple(n) for run in runs for site, n in (run.context.get(LABELLED) or {}).items()}
    if known:
        outlined = "; ".join(f"{site}: {', '.join(names) or 'none'}" for site, names in sorted(known.items()))
        yield (
            "A site's score is over the classes outlined in its test cases, and the mean of a class over the "
            f"sites that outlined it there. Outlined for training: {outlined}."
        )
    silent = sorted({site for run in runs for site in run.sites if known.get(site) == ()})
    if silent:
        weights = sorted({run.config.get("unlabelled_weight", 0.0) for run in runs})
        share = " or ".join(f"{weight:g}" for weight in weights)
        yield f"Without outlines, {', '.join(silent)} counts {share} of its samples in the average."


def _notes(
    runs: Sequence[Run], rows: Sequence[Row], unseen: Sequence[str], uncompared: str, reference: str
) -> tuple[str, ...]:
    metric, name = find_metric(runs[0].metric), runs[0].title
    name += "" if metric.higher_is_better else " (lower is better)"
    notes = [f"{name} on the test cases; the mean is over the training sites, unweighted."]
    if any(run.in_turn for run in runs):
        turns = (
            f"{name} of each site when it was left out of training; the mean is over the sites, unweighted."
        )
        notes[0] = turns if all(run.in_turn for run in runs) else f"{notes[0]} Holdout in turn: {turns}"
    if any(row.folds > 1 for row in rows):
        whole = any(run.in_turn and run.options.get("unseen") for run in runs)
        once = "a case counts with the mean of its scores" if whole else "every case is tested once"
        notes[0] += f" The folds of a seed are pooled: {once}, by models that never saw it."
    models = sorted({row.model for row in rows})
    if len(models) == 1:
        notes[0] += f" Model of all rows: {models[0]}."
    if unseen:
        notes[0] += " † Unseen: did not train, not in the mean."
    counts = _counts(runs)
    if len(counts) > MOST_SITES:
        notes.append(
            f"{sum(counts.values())} test cases of {len(counts)} sites, whose scores are in the CSV."
        )
    elif counts:
        notes.append("Test cases: " + ", ".join(f"{site} {n}" for site, n in sorted(counts.items())) + ".")
    tested = [row.test for row in rows if row.test]
    if not tested and any(row.verdict for row in rows):
        notes.append(f"Δ: the mean minus the mean of {reference}, over common seeds.")
    if tested:
        notes.append(
            f"Δ and p: paired t-test of the mean against {reference} over common seeds, two-sided, not "
            "corrected for the number of rows. This covers chance in training, not in the choice of "
            f"{compared_metric(runs).cases}."
        )
        notes.append(
            "Could see: the smallest true difference that an experiment with as many seeds, whose "
            "differences vary as much, would find with probability 0.8."
        )
    if any(row.verdict for row in rows):
        notes += [study.rule(reference, compared_metric(runs).cases) for study in added_modules(STUDIES)]
    elif uncompared:
        notes.append(uncompared)
    elif len(rows) > 1:
        notes.append(
            f"No {reference} under the same settings: nothing is compared. Differences may be chance."
        )
    return tuple(notes)


def _counts(runs: Sequence[Run]) -> dict[str, int]:
    """Return the number of test cases by site, in one run or in all folds together."""
    counts: dict[str, int] = {}
    tested = {site for run in runs for site in run.tested}
    for site in {site for run in runs for site in run.cases}:
        # Scores of sites that trained while others were left out have no column.
        testing = [run for run in runs if site in ({*run.tested} if site in tested else run.unseen)]
        named = {case for run in testing for case in run.case_scores.get(site, {})}
        if testing:
            counts[site] = len(named) or max(run.cases.get(site, 0) for run in testing)
    return counts
