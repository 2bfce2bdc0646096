"""`compare_groups`: every method against a reference, over seeds and by patient, with one verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from medfedaug.analysis.grouping import Tested, experiment, units_differ, whole_seeds
from medfedaug.analysis.verdict import Elsewhere, Verdict, chance, judge, lacks
from medfedaug.errors import ConfigError
from medfedaug.metrics.crossed import CrossedTest, crossed_test, holm
from medfedaug.metrics.registry import UNSEEN as UNSEEN_SITE
from medfedaug.metrics.registry import Metric
from medfedaug.metrics.significance import (
    PairedTest,
    PatientTest,
    compare_patients,
    paired_t_test,
    patient_means,
)
from medfedaug.runs.input_scaling import OTHER_INPUT, input_note
from medfedaug.runs.run import BASELINE, Run, compared_metric

MIN_SEEDS = 3  # two pairs leave only one degree of freedom, with a useless interval
MIN_PATIENTS = 6  # with five, the p-value cannot be below 0.05
UNSEEN = "unseen sites"

RESOLUTION = "could see"


@dataclass(frozen=True)
class Comparison:
    """Comparison of a method with a reference under otherwise equal settings, at one kind of site.

    Attributes:
        label: the method's label.
        baseline: the reference's label.
        where: ``"training sites"``, ``"sites left out"`` or ``"unseen sites"``.
        num_seeds: the number of common seeds with all folds and sites.
        difference: the mean over these seeds of the difference of the means; ``None`` without a common one.
        seeds: the comparison of the means over the sites, seed by seed; ``None`` for fewer than three, and
            where all differences are equal: a variation of 0 is no measure of chance.
        run_seeds: the number of seeds over which the patients' scores are averaged.
        num_patients: the number of common patients; a case whose patient no site names counts as one.
        patients: the comparison of the patients' mean scores; ``None`` for fewer than six, and where all
            differences are 0.
        crossed: the comparison of seeds and patients together; ``None`` where one of them does not vary.
        without: for each site the same of the patients of all other sites; ``None`` where there are none.
        adjusted: the p-value of the verdict, adjusted for all methods of the table; ``None`` where the
            verdict is open.
        metric: the score, and what is counted (`medfedaug.runs.run.compared_metric`).
        learned: whether one of the two learned anything (`medfedaug.metrics.nothing_learned`).
        other_input: whether the method's input was scaled differently from that of the reference.
        model: whose model the method's scores are of.
        other_files: the sites at which runs of one seed, fold and held-out site had other files.
        other_plans: the runs for which the sites' fingerprints decided otherwise than for the reference's run
            of the same seed, fold and held-out site.
    """

    label: str
    baseline: str
    where: str
    num_seeds: int
    difference: float | None
    seeds: PairedTest | None
    run_seeds: int
    num_patients: int
    patients: PatientTest | None
    crossed: CrossedTest | None
    without: Mapping[str, Elsewhere | None]
    metric: Metric
    learned: bool
    other_input: bool
    model: str
    other_files: tuple[str, ...]
    other_plans: tuple[str, ...]
    adjusted: float | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict (`medfedaug.analysis.verdict.judge`); ``None`` where neither learned anything."""
        if not self.learned:
            return None
        return judge(
            self.seeds,
            self.num_seeds,
            self.crossed,
            self.num_patients,
            self.metric,
            adjusted=self.adjusted,
            without=self.without,
        )


def compare_groups(groups: Mapping[str, Sequence[Run]], reference: str = BASELINE) -> list[Comparison]:
    """Compare every method with the reference, at sites that trained or were left out, and at unseen sites.

    A case's score is the mean over the seeds and folds that a method and the reference have in common, and a
    patient's that over the patient's cases. A patient is one pair, however many seeds and cases there are.
    One who is named alike at two sites counts as two.

    Methods of which neither learned anything (`medfedaug.metrics.nothing_learned`) are not compared. The
    p-values of all comparisons that have enough seeds and patients are adjusted together (`adjusted`).

    Args:
        groups: of `medfedaug.analysis.grouping.group_runs`.
        reference: the methods that all others are compared with, joined by commas.
    """
    return adjusted(compared(groups, reference))


def compared(groups: Mapping[str, Sequence[Run]], reference: str = BASELINE) -> list[Comparison]:
    """Compare as `compare_groups` does, without adjusting p-values: for tables of several comparisons."""
    used = [members[0].methods for members in groups.values()]
    if reference != BASELINE and {*reference.split(",")} not in map(set, used):
        known = "; ".join(dict.fromkeys(map(",".join, used)))
        raise ConfigError(f"no run of {reference} to compare with; there are runs of {known}")
    pooled, _ = whole_seeds(groups)
    metric = compared_metric([run for members in groups.values() for run in members])
    found = []
    for label, members in groups.items():
        baseline = _baseline(groups, label, reference)
        if baseline is None:
            continue
        theirs = {run.repetition: run for run in groups[baseline]}
        pairs = [(run, theirs[run.repetition]) for run in members if run.repetition in theirs]
        learned = not pairs or any(not run.nothing_learned for pair in pairs for run in pair)
        trained = "sites left out" if members[0].in_turn else "training sites"
        for where in (trained, UNSEEN):
            means = _by_seed(pooled[label], pooled[baseline], where == trained)
            scores = _by_patient(pairs, where == trained)
            if where == UNSEEN and not scores:
                continue
            table = _differences(pairs, scores, where == trained) if learned else {}
            paired = [*scores.values()]
            found.append(
                Comparison(
                    label=label,
                    baseline=baseline,
                    where=where,
                    num_seeds=len(means),
                    difference=fmean(ours - theirs for ours, theirs in means) if means and learned else None,
                    seeds=paired_t_test(*zip(*means, strict=True))
                    if learned and len(means) >= MIN_SEEDS and _vary(means)
                    else None,
                    run_seeds=len({run.seed for run, _ in pairs}),
                    num_patients=len(paired),
                    patients=compare_patients(
                        *zip(*paired, strict=True), higher_is_better=metric.higher_is_better
                    )
                    if learned and len(paired) >= MIN_PATIENTS and any(one != other for one, other in paired)
                    else None,
                    crossed=_crossed([*table.values()]),
                    without={site: _elsewhere(table, site) for site in sorted({site for site, _ in table})},
                    metric=metric,
                    learned=learned,
                    other_input=members[0].input.differs(groups[baseline][0].input),
                    model=members[0].model if where == trained else UNSEEN_SITE,
                    other_files=_other_files(pairs),
                    other_plans=_other_plans(pairs),
                )
            )
    return found


def adjusted(found: Sequence[Comparison]) -> list[Comparison]:
    """Adjust the p-values of the comparisons of a table, those that can have a verdict, for their number."""
    judged = [
        k
        for k, one in enumerate(found)
        if one.learned and one.seeds and one.crossed and not lacks(one.num_seeds, one.num_patients)
    ]
    p_values = holm([chance(found[k].seeds, found[k].crossed) for k in judged])
    by_index = dict(zip(judged, p_values, strict=True))
    return [replace(one, adjusted=by_index.get(k)) for k, one in enumerate(found)]


def delta(reference: str) -> str:
    """Return the heading of the column of differences.

    >>> delta("fedavg")
    'Δ to fedavg [95% CI]'
    """
    return f"Δ to {reference} [95% CI]"


def input_notes(
    groups: Mapping[str, Sequence[Run]], marked: Sequence[str], reference: str = BASELINE
) -> tuple[str, ...]:
    """The note on rows whose input was scaled differently from that of the row they are compared with."""
    notes: dict[str, list[str]] = {}
    for label in dict.fromkeys(marked):
        notes.setdefault(_baseline(groups, label, reference) or next(iter(groups)), []).append(label)
    return tuple(
        input_note(reference, {label: groups[label][0].input for label in (reference, *labels)})
        for reference, labels in notes.items()
    )


def unlike_notes(found: Iterable[Comparison]) -> tuple[str, ...]:
    """Notes on methods that did not have the same files, or the same plan, as their reference."""
    notes: dict[str, dict[str, None]] = {}
    for one in found:  # a method is compared at training sites and at unseen ones, and named once
        for note in _unlike(one):
            notes.setdefault(note, {})[one.label] = None
    return tuple(f"{', '.join(labels)}: not the same {note}" for note, labels in notes.items())


def _unlike(one: Comparison) -> Iterator[str]:
    if one.other_files:
        yield (
            f"files as {one.baseline} at {', '.join(one.other_files)}; a difference may come of the data and "
            "not of the method, and two cases of one name may be different ones."
        )
    if one.other_plans:
        yield (
            f"plan as {one.baseline} ({'; '.join(one.other_plans)}); a difference may come of the plan and "
            "not of the method."
        )


def difference_cells(test: PairedTest | PatientTest | None) -> list[str]:
    """Difference with interval, p-value and resolution, as text; empty if there is no test."""
    if test is None:
        return ["", "", ""]
    p = "<0.001" if test.p < 0.001 else f"{test.p:.3f}"
    return [f"{test.difference:+.3f} [{test.low:+.3f}, {test.high:+.3f}]", p, f"{test.detectable:.3f}"]


def marked(label: str, other_input: bool) -> str:
    """A row's label, with a mark if its input was scaled differently."""
    return f"{label} {OTHER_INPUT}" if other_input else label


def _baseline(groups: Mapping[str, Sequence[Run]], label: str, reference: str) -> str | None:
    """The group of the reference that a group can be compared with, which differs only in its methods.

    With ``intensity`` ``"by_method"`` its input may be scaled differently; one with the same input is
    preferred.
    """
    run = groups[label][0]
    wanted = {*reference.split(",")}
    plain = [name for name, members in groups.items() if name != label and {*members[0].methods} == wanted]
    for decided in (False, True):  # a plan that was given may be the one that fingerprints led to elsewhere
        able = [other for other in plain if _comparable(groups[other][0], run, decided)]
        if able:
            return min(able, key=lambda other: groups[other][0].input.differs(run.input))
    return None


def _comparable(baseline: Run, run: Run, decided: bool) -> bool:
    """True where two runs differ only in their methods and possibly in seed, fold and held-out sites."""
    one, two = experiment(baseline, decided=decided), experiment(run, decided=decided)
    if not baseline.input.differs(run.input):  # two settings may mean the same input
        one.pop("intensity", None)
        two.pop("intensity", None)
    return one == two


def _other_files(pairs: Sequence[tuple[Run, Run]]) -> tuple[str, ...]:
    recorded = [(run.context.get("files", {}), other.context.get("files", {})) for run, other in pairs]
    return tuple(
        sorted({site for one, two in recorded for site in one.keys() & two.keys() if one[site] != two[site]})
    )


def _other_plans(pairs: Sequence[tuple[Run, Run]]) -> tuple[str, ...]:
    return tuple(
        run.name
        for run, other in pairs
        if any(run.config[key] != other.config[key] for key in (*run.planned, *other.planned))
    )


def _by_seed(seeds: Sequence[Tested], baseline: Sequence[Tested], about: bool) -> list[tuple[float, float]]:
    """One pair of means over the sites, for each seed in which both methods tested the same sites.

    Where a site has no score by one of the two, such as HD95 where nothing was found, both means are over the
    other sites: means over different sites are no pair.
    """
    ours, theirs = ({s.seed: s for s in group if s.whole and not s.untested} for group in (seeds, baseline))
    pairs = []
    for seed in sorted(ours.keys() & theirs.keys()):
        one, two = ours[seed], theirs[seed]
        if one.parts != two.parts or one.sites.keys() != two.sites.keys():
            continue
        if about and (one.mean is None or two.mean is None):  # as where sites measure in different units
            continue
        means = _means(one.sites, two.sites) if about else _means(one.unseen, two.unseen)
        if means is not None:
            pairs.append(means)
    return pairs


def _vary(pairs: Sequence[tuple[float, float]]) -> bool:
    """True where not all pairs differ by the same."""
    differences = [one - other for one, other in pairs]
    return max(differences) - min(differences) > 1e-12


def _means(one: Mapping[str, float | None], two: Mapping[str, float | None]) -> tuple[float, float] | None:
    """Unweighted means over the sites that both methods could score; ``None`` where there is none."""
    known = [
        (ours, theirs)
        for site in sorted(one.keys() & two.keys())
        if (ours := one[site]) is not None and (theirs := two[site]) is not None
    ]
    return (fmean(a for a, _ in known), fmean(b for _, b in known)) if known else None


def _by_patient(
    pairs: Sequence[tuple[Run, Run]], about: bool, seed: int | None = None
) -> dict[tuple[str, str], tuple[float, float]]:
    """One pair of scores for each patient: means over the runs in which both methods have one, and the cases.

    There is none where the sites measure a length in different units.

    Args:
        pairs: the runs of two methods.
        about: whether to use the sites that the runs are about, or those that are unseen in all runs.
        seed: of the runs to use; ``None`` uses all.
    """
    mine = {site for pair in pairs for run in pair for site in run.tested}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run, other in pairs:
        if seed is not None and run.seed != seed:
            continue
        sites = {*run.tested} & {*other.tested} if about else ({*run.unseen} & {*other.unseen}) - mine
        for site in sorted(sites):
            ours, theirs = run.case_scores.get(site, {}), other.case_scores.get(site, {})
            for case in ours.keys() & theirs.keys():
                one, two = ours[case], theirs[case]
                if one is not None and two is not None:
                    found.setdefault((site, case), []).append((one, two))
    means = {key: (fmean(a for a, _ in found[key]), fmean(b for _, b in found[key])) for key in sorted(found)}
    runs = [run for pair in pairs for run in pair]
    if units_differ(runs, {site for site, _ in means}):
        return {}
    return patient_means(means, _patients(runs))


def _differences(
    pairs: Sequence[tuple[Run, Run]], patients: Iterable[tuple[str, str]], about: bool
) -> dict[tuple[str, str], list[float]]:
    """By patient, the difference with each common seed; NaN where a seed has no score."""
    by_seed = [_by_patient(pairs, about, seed) for seed in sorted({run.seed for run, _ in pairs})]
    nothing = (math.nan, math.nan)
    return {
        patient: [one - other for scores in by_seed for one, other in [scores.get(patient, nothing)]]
        for patient in patients
    }


def _crossed(by_patient: Sequence[Sequence[float]]) -> CrossedTest | None:
    return crossed_test([*zip(*by_patient, strict=True)]) if by_patient else None


def _elsewhere(table: Mapping[tuple[str, str], Sequence[float]], site: str) -> Elsewhere | None:
    rows = [row for (other, _), row in table.items() if other != site]
    means = [fmean(value for value in row if not math.isnan(value)) for row in rows]
    return Elsewhere(fmean(means), _crossed(rows)) if rows else None


def _patients(runs: Iterable[Run]) -> Callable[[tuple[str, str]], tuple[str, str]]:
    """Map each case of a site to the first case of its patient; cases are of one patient if any run says so.

    Runs are put together by their cases, since each counts patients in an order of its own.
    """
    same: dict[tuple[str, str], tuple[str, str]] = {}

    def first(case: tuple[str, str]) -> tuple[str, str]:
        while (other := same.get(case, case)) != case:
            case = other
        return case

    for run in runs:
        for site, patients in run.patients.items():
            known: dict[int, tuple[str, str]] = {}
            for case, number in patients.items():
                one, other = first((site, case)), first(known.setdefault(number, (site, case)))
                same[max(one, other)] = min(one, other)
    return first
