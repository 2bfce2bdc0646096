"""`nothing_learned_in` detects models no better than a constant answer, whose comparison is meaningless."""

from collections.abc import Mapping
from typing import Any

from medfedaug.metrics.registry import METRICS, find_metric
from medfedaug.utils.validation import number_or_none

REMEDIES = (
    "Likely remedies: more rounds or local epochs, another learning rate, patches around the foreground "
    "(--plan auto), and a look at the label maps (medfedaug inspect); docs/howto/diverges.md has the list."
)
"""Remedies, for a reader of a page or a terminal."""

_SHOWN = 0.0005  # three digits of it are not 0


def nothing_learned_in(test: Mapping[str, Any]) -> str:
    """Return the reason why the scores of a model show that it learned nothing, if they do.

    Returns:
        The reason: every score is 0 in three digits (for
        `medfedaug.metrics.base.Metric.zero_is_nothing`); every case with a score is undivided
        (`medfedaug.metrics.label_maps.LabelMaps.undivided`), as by marking all or nothing of any image; or
        each site with images of several classes gives them all one class. Otherwise empty.

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
        if all(entry[metric] < _SHOWN for entry in known):
            shown = "0.000" if any(entry[metric] for entry in known) else "0"
            return f"every test {find_metric(metric).title} is {shown}"
        whole = all(_is_undivided(entry) for entry in known)
        return "every test image was marked whole, or given one class" if whole else ""
    recall = next(name for name, known_metric in METRICS.items() if known_metric.is_recall)
    recalls = [[scores.get(recall) for scores in entry.get("classes", {}).values()] for entry in entries]
    by_site = [[value for value in values if value is not None] for values in recalls]
    several = [values for values in by_site if len(values) > 1]
    one_for_all = several and all(sorted(values) == [0.0] * (len(values) - 1) + [1.0] for values in several)
    return "every test image of a site was given one class" if one_for_all else ""


def nothing_learned_at(metric: str, scores: Mapping[str, float | None]) -> list[str]:
    """Return the sites with a score that is 0 in three digits, if 0 means that nothing was found.

    Example:
        >>> nothing_learned_at("dice", {"A": 0.61, "B": 0.0002, "C": None})
        ['B']
    """
    low = [site for site, score in scores.items() if score is not None and score < _SHOWN]
    return low if low and find_metric(metric).zero_is_nothing else []


def _is_undivided(entry: Mapping[str, Any]) -> bool:
    cases = entry.get("cases")
    scored = sum(score is not None for score in cases.values()) if isinstance(cases, Mapping) else 0
    return bool(scored) and number_or_none(entry.get("undivided", 0)) == scored
