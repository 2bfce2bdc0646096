"""`compare_groups` compares every method with a reference, over seeds and by patient, with one verdict."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from medfedaug.analysis.grouping import Tested, experiment, units_differ, whole_seeds
from medfedaug.errors import ConfigError
from medfedaug.metrics.base import Metric
from medfedaug.metrics.registry import UNSEEN as UNSEEN_SITE
from medfedaug.metrics.significance import PairedTest, paired_t_test, patient_means
from medfedaug.research.comparison.paired_tests import (
    CrossedTest,
    PatientTest,
    compare_patients,
    crossed_test,
    holm,
    rare_loss_test,
)
from medfedaug.research.comparison.verdict import Elsewhere, Verdict, chance, judge, lacks
from medfedaug.runs.run import BASELINE, Run, compared_metric

MIN_SEEDS = 3  # two pairs leave only one degree of freedom, with a useless interval
MIN_PATIENTS = 6  # with five, the p-value cannot be below 0.05
UNSEEN = "unseen sites"


@dataclass(frozen=True)
class Comparison:
    """Comparison of a method with a reference under otherwise equal settings, at one kind of site."""

    label: str
    baseline: str
    where: str  # "training sites", "sites left out" or "unseen sites"
    num_seeds: int  # the number of common seeds with all folds and sites
    # The mean over these seeds of the difference of the means; `None` without a common seed.
    difference: float | None
    # The comparison of the means over the sites, seed by seed; `None` for fewer than three, and if all
    # differences are equal: a variation of 0 does not measure chance.
    seeds: PairedTest | None
    run_seeds: int  # the number of seeds over which the patients' scores are averaged
    num_patients: int  # the number of common patients; a case without a named patient counts as one
    # The comparison of the patients' mean scores; `None` for fewer than six, and if all differences are 0.
    patients: PatientTest | None
    # This, `rare`, `without` and `adjusted` are those of `medfedaug.research.comparison.verdict.judge`.
    crossed: CrossedTest | None
    rare: float
    without: Mapping[str, Elsewhere | None]
    metric: Metric  # the score, and the unit of comparison (`medfedaug.runs.run.compared_metric`)
    learned: bool  # the reference learned something (`medfedaug.metrics.registry`)
    other_input: bool  # the method's input was scaled differently from the reference's
    model: str
    # The sites at which runs of one seed, fold and held-out site had other files.
    other_files: tuple[str, ...]
    adjusted: float | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict (`judge`); ``None`` if the reference learned nothing."""
        if not self.learned:
            return None
        return judge(
            self.seeds,
            self.num_seeds,
            self.crossed,
            self.num_patients,
            self.metric,
            rare=self.rare,
            adjusted=self.adjusted,
            without=self.without,
        )


def compare_groups(groups: Mapping[str, Sequence[Run]], reference: str = BASELINE) -> list[Comparison]:
    """Compare every method with the reference, at sites that trained or were left out, and at unseen sites.

    A case's score is the mean over the seeds and folds that a method and the reference have in common; a
    patient's score is the mean over the patient's cases. A patient is one pair for any number of seeds and
    cases. Patients with one name at two sites count as two.

    Nothing is compared with a reference that learned nothing (`medfedaug.metrics.registry`): whoever
    learns first is better then. The p-values of all comparisons with enough seeds and patients are adjusted
    together.

    Args:
        groups: result of `medfedaug.analysis.grouping.group_runs`.
    """
    used = [members[0].methods for members in groups.values()]
    if reference != BASELINE and {*reference.split(",")} not in map(set, used):
        known = "; ".join(dict.fromkeys(map(",".join, used)))
        raise ConfigError(f"no run of {reference} to compare with; the runs are of {known}")
    pooled, _ = whole_seeds(groups)
    metric = compared_metric([run for members in groups.values() for run in members])
    comparisons = []
    for label, members in groups.items():
        baseline = _baseline(groups, label, reference)
        if baseline is None:
            continue
        theirs = {run.repetition: run for run in groups[baseline]}
        pairs = [(run, theirs[run.repetition]) for run in members if run.repetition in theirs]
        learned = any(not run.nothing_learned for run in groups[baseline])
        trained = "sites left out" if members[0].in_turn else "training sites"
        for where in (trained, UNSEEN):
            means = _by_seed(pooled[label], pooled[baseline], where == trained)
            scores = _by_patient(pairs, where == trained)
            if where == UNSEEN and not scores:
                continue
            table = _differences(pairs, scores, where == trained) if learned else {}
            paired = [*scores.values()]
            comparisons.append(
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
                    rare=_rare(paired, metric) if learned else 1.0,
                    without={site: _elsewhere(table, site) for site in sorted({site for site, _ in table})},
                    metric=metric,
                    learned=learned,
                    other_input=members[0].input.differs(groups[baseline][0].input),
                    model=members[0].model if where == trained else UNSEEN_SITE,
                    other_files=_other_files(pairs),
                )
            )
    return _adjusted(comparisons)


def _adjusted(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Adjust the p-values of a table's comparisons for the number of comparisons that can have a verdict."""
    judged = [
        k
        for k, comparison in enumerate(comparisons)
        if comparison.learned
        and comparison.seeds
        and comparison.crossed
        and not lacks(comparison.num_seeds, comparison.num_patients)
    ]
    p_values = holm(
        [chance(comparisons[k].seeds, comparisons[k].crossed, comparisons[k].rare) for k in judged]
    )
    by_index = dict(zip(judged, p_values, strict=True))
    return [replace(comparison, adjusted=by_index.get(k)) for k, comparison in enumerate(comparisons)]


def unlike_notes(comparisons: Iterable[Comparison]) -> tuple[str, ...]:
    """Return notes on methods whose files differ from their reference's."""
    notes: dict[str, dict[str, None]] = {}
    for one in comparisons:  # a method compared at training sites and at unseen ones is named once
        if one.other_files:
            files = f"files as {one.baseline} at {', '.join(one.other_files)}"
            notes.setdefault(files, {})[one.label] = None
    return tuple(
        f"{', '.join(labels)}: not the same {files}; the data may cause a difference, not the method, and "
        "two cases of one name may be different ones."
        for files, labels in notes.items()
    )


def _baseline(groups: Mapping[str, Sequence[Run]], label: str, reference: str) -> str | None:
    """Return the group of the reference that differs from a group only in its methods.

    With ``intensity`` ``"by_method"`` its input may be scaled differently; the same input is preferred.
    """
    run = groups[label][0]
    methods = {*reference.split(",")}
    plain = [name for name, members in groups.items() if name != label and {*members[0].methods} == methods]
    able = [other for other in plain if _comparable(groups[other][0], run)]
    return min(able, key=lambda other: groups[other][0].input.differs(run.input)) if able else None


def _comparable(baseline: Run, run: Run) -> bool:
    """Return whether two runs differ at most in methods, seed, fold and held-out sites."""
    one, two = experiment(baseline), experiment(run)
    if not baseline.input.differs(run.input):  # two settings may mean the same input
        one.pop("intensity", None)
        two.pop("intensity", None)
    return one == two


def _other_files(pairs: Sequence[tuple[Run, Run]]) -> tuple[str, ...]:
    recorded = [(run.context.get("files", {}), other.context.get("files", {})) for run, other in pairs]
    return tuple(
        sorted({site for one, two in recorded for site in one.keys() & two.keys() if one[site] != two[site]})
    )


def _by_seed(seeds: Sequence[Tested], baseline: Sequence[Tested], trained: bool) -> list[tuple[float, float]]:
    """Return a pair of means over the sites for each seed in which both methods tested the same sites.

    If one of the two has no score at a site, such as HD95 of an empty prediction, both means are over the
    other sites: means over different sites are not a pair.
    """
    ours, theirs = ({s.seed: s for s in group if s.whole and not s.untested} for group in (seeds, baseline))
    pairs = []
    for seed in sorted(ours.keys() & theirs.keys()):
        one, two = ours[seed], theirs[seed]
        if one.parts != two.parts or one.sites.keys() != two.sites.keys():
            continue
        if trained and (one.mean is None or two.mean is None):  # as where sites measure in different units
            continue
        means = _means(one.sites, two.sites) if trained else _means(one.unseen, two.unseen)
        if means is not None:
            pairs.append(means)
    return pairs


def _vary(pairs: Sequence[tuple[float, float]]) -> bool:
    differences = [one - other for one, other in pairs]
    return max(differences) - min(differences) > 1e-12


def _means(one: Mapping[str, float | None], two: Mapping[str, float | None]) -> tuple[float, float] | None:
    """Return unweighted means over the sites that both methods could score, if any."""
    known = [
        (ours, theirs)
        for site in sorted(one.keys() & two.keys())
        if (ours := one[site]) is not None and (theirs := two[site]) is not None
    ]
    return (fmean(a for a, _ in known), fmean(b for _, b in known)) if known else None


def _by_patient(
    pairs: Sequence[tuple[Run, Run]], trained: bool, seed: int | None = None
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return a pair of scores for each patient: means over cases and over the runs in which both have one.

    Without pairs if the sites measure a length in different units. Either of sites that ``trained``, or of
    those that are unseen in all runs.
    """
    tested = {site for pair in pairs for run in pair for site in run.tested}
    scores: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run, other in pairs:
        if seed is not None and run.seed != seed:
            continue
        sites = {*run.tested} & {*other.tested} if trained else ({*run.unseen} & {*other.unseen}) - tested
        for site in sorted(sites):
            ours, theirs = run.case_scores.get(site, {}), other.case_scores.get(site, {})
            for case in ours.keys() & theirs.keys():
                one, two = ours[case], theirs[case]
                if one is not None and two is not None:
                    scores.setdefault((site, case), []).append((one, two))
    means = {
        case: (fmean(a for a, _ in scores[case]), fmean(b for _, b in scores[case]))
        for case in sorted(scores)
    }
    runs = [run for pair in pairs for run in pair]
    if units_differ(runs, {site for site, _ in means}):
        return {}
    return patient_means(means, _patients(runs))


def _differences(
    pairs: Sequence[tuple[Run, Run]], patients: Iterable[tuple[str, str]], trained: bool
) -> dict[tuple[str, str], list[float]]:
    """Return the differences by patient and common seed; NaN if a seed has no score."""
    by_seed = [_by_patient(pairs, trained, seed) for seed in sorted({run.seed for run, _ in pairs})]
    nothing = (math.nan, math.nan)
    return {
        patient: [one - other for scores in by_seed for one, other in [scores.get(patient, nothing)]]
        for patient in patients
    }


def _crossed(by_patient: Sequence[Sequence[float]]) -> CrossedTest | None:
    return crossed_test([*zip(*by_patient, strict=True)]) if by_patient else None


def _rare(pairs: Sequence[tuple[float, float]], metric: Metric) -> float:
    """Test whether rare losses could undo the difference.

    A patient loses at most the best baseline score of the sample, and gains at most what the worst one lacks.
    """
    differences = [ours - theirs for ours, theirs in pairs]
    if not any(differences):
        return 1.0
    if fmean(differences) > 0:
        return rare_loss_test(differences, -max(theirs for _, theirs in pairs))
    return rare_loss_test([-d for d in differences], min(theirs for _, theirs in pairs) - metric.largest)


def _elsewhere(table: Mapping[tuple[str, str], Sequence[float]], site: str) -> Elsewhere | None:
    rows = [row for (other, _), row in table.items() if other != site]
    means = [fmean(value for value in row if not math.isnan(value)) for row in rows]
    return Elsewhere(fmean(means), _crossed(rows)) if rows else None


def _patients(runs: Iterable[Run]) -> Callable[[tuple[str, str]], tuple[str, str]]:
    """Map each case of a site to the first case of its patient; one run suffices to join two cases.

    Runs are joined by their cases, since each run numbers patients in its own order.
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
