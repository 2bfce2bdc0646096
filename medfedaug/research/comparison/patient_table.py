"""`patient_table` compares methods with FedAvg patient by patient, for the report of several runs, too."""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any

from medfedaug.analysis import page
from medfedaug.analysis.grouping import Groups, group_runs
from medfedaug.analysis.score_table import (
    MOST_SITES,
    RESOLUTION,
    cells_note,
    delta,
    difference_cells,
    input_notes,
    marked,
)
from medfedaug.analysis.text_table import TextTable
from medfedaug.research.comparison.comparison import (
    MIN_PATIENTS,
    UNSEEN,
    Comparison,
    compare_groups,
    unlike_notes,
)
from medfedaug.research.comparison.local_vs_global import worth_table
from medfedaug.research.comparison.verdict import rule
from medfedaug.runs.run import BASELINE, MODEL, OTHER_INPUT, Run, compared_metric
from medfedaug.utils.printable import counted

_MOST_SENTENCES = 3


def sentence(row: Comparison, reference: str) -> str:
    """Return the result, the verdict, and the resolution of the experiment, in words."""
    t = row.patients
    assert t is not None
    p = "p < 0.001" if t.p < 0.001 else f"p = {t.p:.3f}"
    return (
        f"{row.label}, {row.where}, model {row.model}: {t.difference:+.3f} {row.metric.in_text} against "
        f"{reference} on the same {t.patients} {row.metric.cases} (95% interval {t.low:+.3f} to "
        f"{t.high:+.3f}, {p}), with {counted(row.run_seeds, 'seed')}. Verdict: {row.verdict}. "
        f"A true difference of {t.detectable:.3f} or more would have been seen four times in five."
        + (f" The two did not see the same input ({OTHER_INPUT})." if row.other_input else "")
    )


def patient_table(runs: Sequence[Run], reference: str = BASELINE) -> TextTable:
    """Compare methods with the reference, paired by patient.

    Pairs are made as in `compare_groups`. If each site was left out in turn, the run without it scores its
    patients. The table has the mean difference over the patients, its 95% interval and p-value
    (`medfedaug.research.comparison.paired_tests.sign_flip_test`), the smallest detectable difference, and
    the verdict (`medfedaug.research.comparison.verdict.judge`), which also depends on the seeds.

    Args:
        reference: the methods that all others are compared with, joined by commas.

    Returns:
        The table, with a row for each method that has the reference under the same settings with common
        patients.
    """
    groups = group_runs(runs)
    cases = compared_metric(runs).cases
    single = cases.removesuffix("s")
    rows: list[Comparison] = []
    few: dict[str, list[str]] = {}
    comparisons = compare_groups(groups, reference)
    for comparison in comparisons:
        if comparison.patients is not None and comparison.verdict is not None:
            rows.append(comparison)
        elif comparison.num_patients and comparison.learned:
            count = f"{comparison.num_patients} of the {comparison.where}' {cases}"
            reason = "Too few" if comparison.num_patients < MIN_PATIENTS else "No difference"
            few.setdefault(f"{reason} to compare: {count} in common with {reference}", []).append(
                comparison.label
            )
    notes = list(input_notes(groups, {row.label: row.baseline for row in rows if row.other_input}))
    notes += [*unlike_notes(comparisons), *cells_note(runs)]
    if rows:
        seeds = max(row.run_seeds for row in rows)
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
    header = [
        "method",
        delta(reference),
        "p",
        RESOLUTION,
        "better / worse",
        cases,
        "tested at",
        MODEL,
        "verdict",
    ]
    body = [
        [
            marked(row.label, row.other_input),
            *difference_cells(row.patients),
            f"{row.patients.better} / {row.patients.worse}",
            str(row.patients.patients),
            row.where,
            row.model,
            str(row.verdict),
        ]
        for row in rows
        if row.patients
    ]
    return TextTable(header, body, [*map(_record, rows)], tuple(notes), rows=tuple(rows))


def _record(row: Comparison) -> dict[str, Any]:
    names = ("patients", "difference", "low", "high", "p", "detectable", "better", "worse")
    return {
        "method": row.label,
        "model": row.model,
        "where": row.where,
        "seeds": row.run_seeds,
        "other_input": row.other_input,
        **{name: getattr(row.patients, name) for name in names},
        "verdict": str(row.verdict),
    }


def compare(groups: Groups, reference: str) -> list[Comparison]:
    """Compare the scores at the training sites, or at those left out, with a reference."""
    return [one for one in compare_groups(groups, reference) if one.where != UNSEEN]


def add_comparisons(body: ET.Element, runs: Sequence[Run], reference: str) -> None:
    """Append comparisons by patient."""
    pairs = patient_table(runs, reference)
    cases = compared_metric(runs).cases
    section = page.start_section(body, f"Paired by {cases.removesuffix('s')}", folded=True)
    if pairs.rows:
        for row in pairs.rows if len(pairs.rows) <= _MOST_SENTENCES else ():
            page.add(section, "p", sentence(row, reference))
        page.text_table(section, pairs)
        return
    text = f"Nothing to compare: it takes {reference} and another method under the same settings, with "
    text += f"the same seed, and {MIN_PATIENTS} or more {cases} with scores in both runs."
    page.add(section, "p", text)
    for note in pairs.notes:
        page.remark(section, note)


def add_evaluations(body: ET.Element, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Append the comparisons of the federation's models with the sites' own."""
    for content in evaluations:
        section = page.start_section(body, "Is the federation worth it for a site?")
        worth = worth_table(content)
        for row in worth.rows if len(worth.rows) <= MOST_SITES else ():
            page.add(section, "p", row.sentence)
        page.text_table(section, worth)
