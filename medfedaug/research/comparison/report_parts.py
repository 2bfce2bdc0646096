"""Comparisons that studies add to the report of several runs."""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any

from medfedaug.analysis import page
from medfedaug.analysis.grouping import Groups
from medfedaug.analysis.score_table import MOST_SITES
from medfedaug.research.comparison.comparison import (
    MIN_PATIENTS,
    UNSEEN,
    Comparison,
    compare_groups,
    unlike_notes,
)
from medfedaug.research.comparison.local_vs_global import worth_table
from medfedaug.research.comparison.patient_table import patient_table, sentence
from medfedaug.research.comparison.verdict import rule
from medfedaug.runs.run import Run, compared_metric

__all__ = ["add_comparisons", "add_evaluations", "compare", "rule", "unlike_notes"]

_MOST_SENTENCES = 3


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
