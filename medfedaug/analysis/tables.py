"""`summary_table`: test scores by method and site; `patient_table`: methods compared patient by patient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from medfedaug.analysis.inputs import OTHER_INPUT, SCALED, Input, input_note
from medfedaug.analysis.runs import BASELINE, Run, Tested, experiment, group_runs, pool_runs
from medfedaug.analysis.significance import PairedTest, PatientTest, compare_patients, paired_t_test
from medfedaug.analysis.text import TextTable

__all__ = ["PatientRow", "PatientTable", "Row", "Score", "Table", "patient_table", "summary_table"]

MIN_SEEDS = 3  # two pairs leave one degree of freedom, and an interval that says nothing
MOST_SITES = 12  # in text; a table of more is read by nobody, and CSV has them all
MIN_PATIENTS = 6  # with five, no outcome of Wilcoxon's test is below 0.05

_DELTA = f"Δ to {BASELINE} [95% CI]"
_RESOLUTION = "could see"
_OTHER_INPUT = f"The two did not see the same input ({OTHER_INPUT})."


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
        seeds: its seeds.
        sites: score by site, unseen sites included.
        mean: mean over the training sites, of the seeds in which all of them were tested.
        folds: over how many folds the patients of a seed are pooled.
        held_out: how many sites were left out in turn; 0 for none.
        test: comparison of ``mean`` with FedAvg's, where there are enough common seeds.
        input: what its networks were shown.
        other_input: whether that is scaled otherwise than what it is compared with.
    """

    label: str
    seeds: tuple[int, ...]
    sites: dict[str, Score]
    mean: Score
    folds: int = 1
    held_out: int = 0
    test: PairedTest | None = None
    input: Input = SCALED
    other_input: bool = False


@dataclass(frozen=True)
class Table(TextTable):
    """Test scores, one row a method.

    Attributes:
        metric: name of the score.
        sites: the training sites, or those that were left out in turn.
        unseen: sites that trained in none of the runs.
        rows: one a method, FedAvg first.
        notes: what a reader must know to read the numbers.
        reduced: see `medfedaug.analysis.text.TextTable`.
    """

    metric: str
    sites: tuple[str, ...]
    unseen: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    reduced: str = ""

    @property
    def optional(self) -> frozenset[str]:
        """The sites: their mean says most, and the report has them all."""
        return frozenset(self.header[1 : 1 + len(self._shown)])

    @property
    def _shown(self) -> tuple[str, ...]:
        sites = (*self.sites, *self.unseen)
        return sites if len(sites) <= MOST_SITES else ()

    @property
    def header(self) -> list[str]:
        """Headings of the columns."""
        compared = [_DELTA, "p", _RESOLUTION] if self._compared else []
        sites = [f"{site} †" if site in self.unseen else site for site in self._shown]
        return ["method", *sites, "mean", "seeds", *compared]

    @property
    def body(self) -> list[list[str]]:
        """The cells as text."""
        lines = []
        for row in self.rows:
            scores = [str(row.sites.get(site, Score(()))) for site in self._shown]
            seeds = str(len(row.seeds)) + (f" × {row.folds} folds" if row.folds > 1 else "")
            seeds += f" × {row.held_out} sites" if row.held_out else ""
            line = [_marked(row), *scores, str(row.mean), seeds]
            if self._compared:
                line += _difference(row.test) if row.test else ["", "", ""]
            lines.append(line)
        return lines

    @property
    def _compared(self) -> bool:
        return any(row.test for row in self.rows)

    def records(self) -> list[dict[str, Any]]:
        """Mean and standard deviation in columns of their own."""
        records = []
        for row in self.rows:
            record: dict[str, Any] = {
                "method": row.label,
                "seeds": " ".join(map(str, row.seeds)),
                "folds": row.folds,
                "held_out": row.held_out,
                "input": str(row.input),
            }
            scores = {site: row.sites.get(site, Score(())) for site in (*self.sites, *self.unseen)}
            for name, score in {**scores, "mean": row.mean}.items():
                record |= {name: score.mean, f"{name}_std": score.std}
            for name in ("difference", "low", "high", "p", "detectable") if self._compared else ():
                record[name] = getattr(row.test, name) if row.test else None
            records.append(record)
        return records


@dataclass(frozen=True)
class PatientRow:
    """One method against FedAvg, patient by patient.

    Attributes:
        label: the methods.
        where: ``"training sites"``, ``"sites left out"`` or ``"unseen sites"``.
        seeds: how many seeds the methods have in common.
        test: the comparison.
        other_input: whether its input was scaled otherwise than FedAvg's.
    """

    label: str
    where: str
    seeds: int
    test: PatientTest
    other_input: bool = False

    def sentence(self, metric: str) -> str:
        """The result and the experiment's resolution, in words."""
        t = self.test
        cases = _cases(metric)
        sure = "may be chance" if t.low <= 0 <= t.high else f"more than the choice of {cases} explains"
        return (
            f"{self.label}, {self.where}: {t.difference:+.3f} {metric.capitalize()} against {BASELINE} on "
            f"the same {t.patients} {cases} (95% interval {t.low:+.3f} to {t.high:+.3f}): {sure}. "
            f"A true difference of {t.detectable:.3f} or more would have been seen four times in five."
            + (f" {_OTHER_INPUT}" if self.other_input else "")
        )


@dataclass(frozen=True)
class PatientTable(TextTable):
    """Methods against FedAvg, patient by patient.

    Attributes:
        metric: name of the score.
        rows: one a method and kind of site.
        notes: what a reader must know to read the numbers.
        reduced: see `medfedaug.analysis.text.TextTable`.
    """

    metric: str
    rows: tuple[PatientRow, ...]
    notes: tuple[str, ...] = ()
    reduced: str = ""

    @property
    def cases(self) -> str:
        """What a pair is: ``"patients"`` or ``"images"``."""
        return _cases(self.metric)

    @property
    def header(self) -> list[str]:
        """Headings of the columns."""
        return ["method", _DELTA, "p", _RESOLUTION, "better / worse", self.cases, "tested at"]

    @property
    def body(self) -> list[list[str]]:
        """The cells as text."""
        return [
            [
                _marked(row),
                *_difference(row.test),
                f"{row.test.better} / {row.test.worse}",
                str(row.test.patients),
                row.where,
            ]
            for row in self.rows
        ]

    def records(self) -> list[dict[str, Any]]:
        """Every number in a column of its own."""
        names = ("patients", "difference", "low", "high", "p", "detectable", "better", "worse")
        return [
            {"method": row.label, "where": row.where, "seeds": row.seeds, "other_input": row.other_input}
            | {name: getattr(row.test, name) for name in names}
            for row in self.rows
        ]


def summary_table(runs: Sequence[Run]) -> Table:
    """Test scores by method and site.

    Runs that differ by seed alone share a row (mean ± standard deviation); the folds of a seed are pooled, so
    that every patient counts once, and where each site was left out in turn, its score is that of the run
    without it (`medfedaug.analysis.runs.pool_runs`). With three or more seeds in common, a row's mean is
    compared with that of FedAvg under otherwise equal settings: mean difference, its 95% confidence interval,
    the p-value of a two-sided paired t-test, uncorrected for the number of rows, and the smallest difference
    that it would have found (`medfedaug.analysis.significance.detectable_difference`).

    Args:
        runs: finished runs of one metric.

    Raises:
        ConfigError: for no run, for different metrics, for one experiment given twice, or for a patient that
            several folds of a seed have tested.
    """
    groups = group_runs(runs)
    runs = [run for members in groups.values() for run in members]
    sites = tuple(sorted({site for run in runs for site in run.tested}))
    unseen = tuple(sorted({site for run in runs for site in run.unseen} - set(sites)))
    pooled = {label: pool_runs(members) for label, members in groups.items()}
    notes = []
    for label, members in groups.items():
        notes += [
            f"{label}, {run.name}, trained without {', '.join(sorted(run.left_out))}."
            for run in members
            if run.left_out
        ]
    for label, seeds in pooled.items():
        most = max(len(seed.parts) for seed in seeds)
        for seed in seeds:
            if len(seed.parts) < most:
                what = _parts({part for seed in seeds for part in seed.parts})
                lacking = f"{label}, seed {seed.seed}, has {len(seed.parts)} of {most} {what}"
                notes.append(f"{lacking} and is left out.")
            elif seed.untested:
                names = ", ".join(sorted(seed.untested))
                lacking = f"{label}, seed {seed.seed}: {names} could not be tested"
                notes.append(f"{lacking}; it does not enter the mean.")
        pooled[label] = [seed for seed in seeds if len(seed.parts) == most]
    turns = {run.held_out for run in runs if run.in_turn}
    rows = []
    first = next(iter(groups))
    for label, seeds in pooled.items():
        folds, turn = ({part[k] for seed in seeds for part in seed.parts} for k in (0, 1))
        in_turn, planned = groups[label][0].in_turn, groups[label][0].options.get("folds")
        if isinstance(planned, int) and planned is not True and len(folds) < planned:
            notes.append(
                f"{label}: {len(folds)} of {planned} folds; the patients of the others are not in it."
            )
        if in_turn and len(turn) < len(turns):
            notes.append(f"{label}: only {len(turn)} of {len(turns)} sites were left out; it has no mean.")
            seeds = [replace(seed, mean=None) for seed in seeds]
        scores = {
            site: Score(_known([{**seed.unseen, **seed.sites}.get(site) for seed in seeds]))
            for site in (*sites, *unseen)
        }
        partner = _baseline(groups, label)
        rows.append(
            Row(
                label=label,
                seeds=tuple(seed.seed for seed in seeds),
                sites=scores,
                mean=Score(_known([seed.mean for seed in seeds if not seed.untested])),
                folds=len(folds),
                held_out=len(turn) if in_turn else 0,
                test=_compare(seeds, pooled[partner]) if partner else None,
                input=groups[label][0].input,
                other_input=groups[label][0].input.differs(groups[partner or first][0].input),
            )
        )
    inputs = _inputs(groups, [row.label for row in rows if row.other_input])
    return Table(runs[0].metric, sites, unseen, tuple(rows), (*inputs, *_notes(runs, rows, unseen), *notes))


def patient_table(runs: Sequence[Run]) -> PatientTable:
    """Methods against FedAvg, paired by patient.

    A patient's score is the mean over the runs that a method and FedAvg share, by seed and fold; a patient is
    one pair, however many seeds there are. Where each site was left out in turn, its patients are scored by
    the run without it. Mean difference over the patients, its 95% bootstrap interval,
    Wilcoxon's signed-rank test, and the smallest difference that so many patients would have shown.

    Args:
        runs: finished runs of one metric.

    Returns:
        The table; without rows where no method has FedAvg under the same settings, and patients in common.

    Raises:
        ConfigError: as `summary_table`.
    """
    groups = group_runs(runs)
    cases = _cases(runs[0].metric)
    single = cases.removesuffix("s")
    rows: list[PatientRow] = []
    few: dict[str, list[str]] = {}
    for label, members in groups.items():
        partner = _baseline(groups, label)
        if not partner:
            continue
        theirs = {run.repetition: run for run in groups[partner]}
        pairs = [(run, theirs[run.repetition]) for run in members if run.repetition in theirs]
        trained = "sites left out" if members[0].in_turn else "training sites"
        for where in (trained, "unseen sites"):
            scores = _by_patient(pairs, where == trained)
            if len(scores) >= MIN_PATIENTS:
                test = compare_patients(*zip(*scores, strict=True))
                other = members[0].input.differs(groups[partner][0].input)
                rows.append(PatientRow(label, where, len({run.seed for run, _ in pairs}), test, other))
            elif scores:
                count = f"{len(scores)} of the {where}' {cases}"
                few.setdefault(f"Too few to compare: {count} in common with {BASELINE}", []).append(label)
    notes = list(_inputs(groups, [row.label for row in rows if row.other_input]))
    if rows:
        seeds = max(row.seeds for row in rows)
        notes.append(
            f"Δ: mean over the {cases} of the difference to {BASELINE}"
            + (f" (for each {single}, of its mean over the common seeds)" if seeds > 1 else "")
            + ", with its 95% bootstrap interval (BCa, 10,000 resamples); p: Wilcoxon's signed-rank test, "
            f"two-sided, not corrected for the number of rows. Every one of the {cases} counts alike, "
            "whatever its site."
        )
        notes.append(
            f"Could see: the smallest true difference that so many {cases}, whose differences vary as these "
            "do, would have shown four times in five. Something smaller may be there, unseen."
        )
        notes.append(
            f"This covers the choice of the {cases} and not the training's randomness"
            + (", of which one seed says nothing." if seeds == 1 else " beyond its mean over the seeds.")
        )
    notes += [f"{what} ({', '.join(labels)})." for what, labels in few.items()]
    return PatientTable(runs[0].metric, tuple(rows), tuple(notes))


def _known(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _cases(metric: str) -> str:
    return "patients" if metric == "dice" else "images"


def _difference(test: PairedTest | PatientTest) -> list[str]:
    p = "<0.001" if test.p < 0.001 else f"{test.p:.3f}"
    return [f"{test.difference:+.3f} [{test.low:+.3f}, {test.high:+.3f}]", p, f"{test.detectable:.3f}"]


def _baseline(groups: Mapping[str, Sequence[Run]], label: str) -> str | None:
    """The FedAvg that a group can be compared with: it differs by its methods alone.

    With ``intensity`` ``"by_method"`` its input may be scaled otherwise; one with the same input goes before.
    """
    run = groups[label][0]
    able = [
        other
        for other, members in groups.items()
        if other != label and members[0].methods == (BASELINE,) and _comparable(members[0], run)
    ]
    return min(able, key=lambda other: groups[other][0].input.differs(run.input), default=None)


def _comparable(baseline: Run, run: Run) -> bool:
    """Whether two runs differ by their methods and, maybe, their seeds, folds and held-out sites alone."""
    one, two = experiment(baseline), experiment(run)
    if not baseline.input.differs(run.input):  # two words may name one input
        one.pop("intensity", None)
        two.pop("intensity", None)
    return one == two


def _marked(row: Row | PatientRow) -> str:
    return f"{row.label} {OTHER_INPUT}" if row.other_input else row.label


def _inputs(groups: Mapping[str, Sequence[Run]], marked: Sequence[str]) -> tuple[str, ...]:
    """The note on rows whose input was scaled otherwise than that of what they are compared with."""
    notes: dict[str, list[str]] = {}
    for label in dict.fromkeys(marked):
        notes.setdefault(_baseline(groups, label) or next(iter(groups)), []).append(label)
    return tuple(
        input_note(reference, {label: groups[label][0].input for label in (reference, *labels)})
        for reference, labels in notes.items()
    )


def _compare(seeds: Sequence[Tested], baseline: Sequence[Tested]) -> PairedTest | None:
    ours, theirs = ({s.seed: s for s in group if not s.untested} for group in (seeds, baseline))
    pairs = [
        (ours[seed].mean, theirs[seed].mean)
        for seed in sorted(ours.keys() & theirs.keys())
        if ours[seed].parts == theirs[seed].parts and ours[seed].sites.keys() == theirs[seed].sites.keys()
    ]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < MIN_SEEDS:
        return None
    return paired_t_test([a for a, _ in known], [b for _, b in known])


def _parts(parts: Set[tuple[str | None, str]]) -> str:
    folds, sites = ({part[k] for part in parts} for k in (0, 1))
    if len(folds) > 1 and len(sites) > 1:
        return "folds and held-out sites"
    return "folds" if len(folds) > 1 else "held-out sites"


def _by_patient(pairs: Sequence[tuple[Run, Run]], about: bool) -> list[tuple[float, float]]:
    """One pair of scores a patient: means over the runs in which both methods have one.

    Args:
        pairs: the runs of two methods.
        about: whether at the sites that the runs are about, or at those that are unseen in all runs.
    """
    mine = {site for pair in pairs for run in pair for site in run.tested}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run, other in pairs:
        sites = {*run.tested} & {*other.tested} if about else ({*run.unseen} & {*other.unseen}) - mine
        for site in sorted(sites):
            ours, theirs = run.case_scores.get(site, {}), other.case_scores.get(site, {})
            for case in ours.keys() & theirs.keys():
                one, two = ours[case], theirs[case]
                if one is not None and two is not None:
                    found.setdefault((site, case), []).append((one, two))
    return [(fmean(a for a, _ in found[key]), fmean(b for _, b in found[key])) for key in sorted(found)]


def _notes(runs: Sequence[Run], rows: Sequence[Row], unseen: Sequence[str]) -> tuple[str, ...]:
    name = runs[0].metric.capitalize()
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
    if tested:
        notes.append(
            f"Δ and p: paired t-test of the mean against {BASELINE} over common seeds, two-sided, not "
            "corrected for the number of rows. It covers the training's randomness, not the patients' choice."
        )
        notes.append(
            "Could see: the smallest true difference that so many seeds, whose differences vary as these "
            "do, would have shown four times in five."
        )
    elif len(rows) > 1:
        notes.append(
            f"Fewer than {MIN_SEEDS} common seeds with {BASELINE}: differences may be chance, none is tested."
        )
    return tuple(notes)


def _counts(runs: Sequence[Run]) -> dict[str, int]:
    """Number of test cases by site: of one run, or of all folds together."""
    counts: dict[str, int] = {}
    about = {site for run in runs for site in run.tested}
    for site in {site for run in runs for site in run.cases}:
        # What trained while others were left out is in no column.
        testing = [run for run in runs if site in ({*run.tested} if site in about else run.unseen)]
        named = {case for run in testing for case in run.case_scores.get(site, {})}
        if testing:
            counts[site] = len(named) or max(run.cases.get(site, 0) for run in testing)
    return counts
