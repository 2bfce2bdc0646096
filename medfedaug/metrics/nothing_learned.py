"""`nothing_learned_in`: models no better than a constant answer, of which no comparison says anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medfedaug.metrics.registry import find_metric, recall_metric
from medfedaug.utils.validation import number_or_none

REMEDIES = (
    "Likely remedies: more rounds or local epochs, another learning rate, patches around the foreground "
    "(--plan auto), and a look at the label maps (medfedaug inspect); docs/howto/diverges.md has the list."
)
"""Remedies, for a reader of a page or a terminal."""


def nothing_learned_in(test: Mapping[str, Any]) -> str:
    """Explain why the scores of a model show that it learned nothing.

    Returns:
        The reason: every score is 0 where that shows it (`medfedaug.metrics.base.Metric.zero_is_nothing`);
        every case with a score is undivided (`medfedaug.metrics.segmentation.LabelMaps.undivided`), which
        marking all or nothing of any image does as well; or at each site with images of several classes all
        of them were given one class. Empty where none of these holds.

    Example:
        >>> nothing_learned_in({"mean": {"dice": 0}, "sites": {"A": {"dice": 0.0}, "B": {"dice": 0.0}}})
        'every test Dice is 0'
        >>> whole = {"dice": 0.2, "cases": {"1": 0.1, "2": 0.3}, "undivided": 2}
        >>> nothing_learned_in({"mean": {"dice": 0.2}, "sites": {"A": whole}})
        'every test image was marked whole, or given one class'
        >>> one = {"cat": {"accuracy": 1.0}, "dog": {"accuracy": 0.0}}
        >>> nothing_learned_in({"mean": {"accuracy": 0.5}, "sites": {"A": {"accuracy": 0.5, "classes": one}}})
        'every test image of a site was given one class'
        >>> nothing_learned_in({"mean": {"dice": 0.1}, "sites": {"A": {"dice": 0.0}, "B": {"dice": 0.2}}})
        ''
    """
    metric = next(iter(test.get("mean", {})), "")
    entries = [e for e in ({**test.get("sites", {}), **test.get("unseen", {})}).values() if metric in e]
    known = [entry for entry in entries if entry[metric] is not None]
    if not known:
        return ""
    if find_metric(metric).zero_is_nothing:
        if not any(entry[metric] for entry in known):
            return f"every test {find_metric(metric).title} is 0"
        whole = all(_is_undivided(entry) for entry in known)
        return "every test image was marked whole, or given one class" if whole else ""
    recall = recall_metric()
    recalls = [[found.get(recall) for found in entry.get("classes", {}).values()] for entry in entries]
    by_site = [[value for value in found if value is not None] for found in recalls]
    several = [found for found in by_site if len(found) > 1]
    one_for_all = several and all(sorted(found) == [0.0] * (len(found) - 1) + [1.0] for found in several)
    return "every test image of a site was given one class" if one_for_all else ""


def _is_undivided(entry: Mapping[str, Any]) -> bool:
    """Return whether a site says that of all its cases with a score."""
    cases = entry.get("cases")
    scored = sum(score is not None for score in cases.values()) if isinstance(cases, Mapping) else 0
    return bool(scored) and number_or_none(entry.get("undivided", 0)) == scored
