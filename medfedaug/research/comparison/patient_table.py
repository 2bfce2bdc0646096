"""`patient_table` compares methods with FedAvg patient by patient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from medfedaug.analysis.grouping import group_runs
from medfedaug.analysis.score_table import (
    RESOLUTION,
    cells_note,
    delta,
    difference_cells,
    input_notes,
    marked,
)
from medfedaug.analysis.text_table import TextTable
from medfedaug.metrics.registry import find_metric
from medfedaug.research.comparison.comparison import (
    MIN_PATIENTS,
    compare_groups,
    unlike_notes,
)
from medfedaug.research.comparison.patient_tests import PatientTest
from medfedaug.research.comparison.verdict import Verdict, rule
from medfedaug.runs.input_scaling import OTHER_INPUT
from medfedaug.runs.run import BASELINE, MODEL, NOT_RECORDED, Run, compared_metric
from medfedaug.utils.printable import counted


@dataclass(frozen=True)
class PatientRow:
    """Comparison of one method with the reference, patient by patient.

    Attributes:
        where: ``"training sites"``, ``"sites left out"`` or ``"unseen sites"``.
        seeds: the number of seeds that the methods have in common.
        verdict: the verdict of this comparison and the comparison over seeds.
        other_input: its input was scaled differently from the reference's.
        model: owner of the model behind its scores.
        cases: unit of comparison, ``"patients"`` or ``"images"``.
        reference: the methods that it is compared with.
    """

    label: str
    where: str
    seeds: int
    test: PatientTest
    verdict: Verdict
    other_input: bool = False
    model: str = NOT_RECORDED
    cases: str = "patients"
    reference: str = BASELINE

    def sentence(self, metric: str) -> str:
        """Return the result, the verdict, and the resolution of the experiment, in words."""
        t, score = self.test, find_metric(metric).in_text
        p = "p < 0.001" if t.p < 0.001 else f"p = {t.p:.3f}"
        return (
            f"{self.label}, {self.where}, model {self.model}: {t.difference:+.3f} {score} against "
            f"{self.reference} on the same {t.patients} {self.cases} (95% interval {t.low:+.3f} to "
            f"{t.high:+.3f}, {p}), with {counted(self.seeds, 'seed')}. Verdict: {self.verdict}. "
            f"A true difference of {t.detectable:.3f} or more would have been seen four times in five."
            + (f" The two did not see the same input ({OTHER_INPUT})." if self.other_input else "")
        )


@dataclass(frozen=True)
class PatientTable(TextTable):
    """Methods against the reference, patient by patient.

    Attributes:
        cases: unit of a pair, ``"patients"`` or ``"images"``.
        reference: the methods that all others are compared with.
    """

    metric: str
    rows: tuple[PatientRow, ...]
    cases: str
    notes: tuple[str, ...] = ()
    reduced: str = ""
    reference: str = BASELINE

    @property
    def header(self) -> list[str]:
        difference = [delta(self.reference), "p", RESOLUTION, "better / worse"]
        return ["method", *difference, self.cases, "tested at", MODEL, "verdict"]

    @property
    def body(self) -> list[list[str]]:
        return [
            [
                marked(row.label, row.other_input),
                *difference_cells(row.test),
                f"{row.test.better} / {row.test.worse}",
                str(row.test.patients),
                row.where,
                row.model,
                str(row.verdict),
            ]
            for row in self.rows
        ]

    def records(self) -> list[dict[str, Any]]:
        names = ("patients", "difference", "low", "high", "p", "detectable", "better", "worse")
        return [
            {
                "method": row.label,
                "model": row.model,
                "where": row.where,
                "seeds": row.seeds,
                "other_input": row.other_input,
            }
            | {name: getattr(row.test, name) for name in names}
            | {"verdict": str(row.verdict)}
            for row in self.rows
        ]


def patient_table(runs: Sequence[Run], reference: str = BASELINE) -> PatientTable:
    """Compare methods with the reference, paired by patient.

    Pairs are made as in `compare_groups`. If each site was left out in turn, the run without it scores its
    patients. The table has the mean difference over the patients, its 95% interval and p-value
    (`medfedaug.research.comparison.patient_tests.sign_flip_test`), the smallest detectable difference, and
    the verdict (`medfedaug.research.comparison.verdict.judge`), which also depends on the seeds.

    Args:
        runs: finished runs of one metric.
        reference: the methods that all others are compared with, joined by commas.

    Returns:
        The table, with a row for each method that has the reference under the same settings with common
        patients.

    Raises:
        ConfigError: as `summary_table`.
    """
    groups = group_runs(runs)
    cases = compared_metric(runs).cases
    single = cases.removesuffix("s")
    rows: list[PatientRow] = []
    few: dict[str, list[str]] = {}
    comparisons = compare_groups(groups, reference)
    for comparison in comparisons:
        if comparison.patients is not None and comparison.verdict is not None:
            rows.append(
                PatientRow(
                    label=comparison.label,
                    where=comparison.where,
                    seeds=comparison.run_seeds,
                    test=comparison.patients,
                    verdict=comparison.verdict,
                    other_input=comparison.other_input,
                    model=comparison.model,
                    cases=cases,
                    reference=reference,
                )
            )
        elif comparison.num_patients and comparison.learned:
            count = f"{comparison.num_patients} of the {comparison.where}' {cases}"
            reason = "Too few" if comparison.num_patients < MIN_PATIENTS else "No difference"
            few.setdefault(f"{reason} to compare: {count} in common with {reference}", []).append(
                comparison.label
            )
    baselines = {comparison.label: comparison.baseline for comparison in comparisons}
    notes = list(input_notes(groups, {row.label: baselines[row.label] for row in rows if row.other_input}))
    notes += [*unlike_notes(comparisons), *cells_note(runs)]
    if rows:
        seeds = max(row.seeds for row in rows)
        over = ["the common seeds"] if seeds > 1 else []
        over += ["the patient's cases"] if any(any(run.patients.values()) for run in runs) else []
        notes.append(
            f"Δ: mean over the {cases} of the difference to {reference}"
            + (f" (for each {single}, of its mean over {' and '.join(over)})" if over else "")
            + "; interval and p are from one test, which changes the signs of differences at random, p "
            f"two-sided and not corrected for the number of rows. All {cases} of all sites have the same "
            "weight."
        )
        notes.append(
            f"Could see: the smallest true difference that an experiment with as many {cases}, whose "
            "differences vary as much, would find with probability 0.8. There may be a smaller one."
        )
        notes.append(
            f"This covers chance in the choice of the {cases}, but not in training"
            + (", about which one seed says nothing." if seeds == 1 else " beyond its mean over the seeds.")
        )
        notes.append(rule(reference, cases))
    notes += [f"{text} ({', '.join(labels)})." for text, labels in few.items()]
    return PatientTable(runs[0].metric, tuple(rows), cases, tuple(notes), reference=reference)
