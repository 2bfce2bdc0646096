"""`nothing_learned`: models that found nothing, of which no comparison says anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from medfedaug.metrics.registry import find_metric, recall_metric

REMEDIES = (
    "Likely remedies: more rounds or local epochs, another learning rate, patches around the foreground "
    "(--plan auto), and a look at the label maps (medfedaug inspect); docs/howto/diverges.md has the list."
)
"""Remedies, for a reader of a page or a terminal."""

Scores = Mapping[str, float | None]


def nothing_learned(metric: str, sites: Scores, recalls: Mapping[str, Scores] | None = None) -> str:
    """Explain why the scores of a model show that it learned nothing.

    Args:
        metric: name of the score.
        sites: the score of each site.
        recalls: of a classification, the accuracy of each class by site.

    Returns:
        The reason: every score is 0 where that shows it (`medfedaug.metrics.base.Metric.zero_is_nothing`), or
        at each site with images of several classes all of them were given one class. Empty where neither
        holds.

    Example:
        >>> nothing_learned("dice", {"A": 0.0, "B": 0.0})
        'every test Dice is 0'
        >>> nothing_learned("accuracy", {"A": 0.5}, {"cat": {"A": 1.0}, "dog": {"A": 0.0}})
        'every test image of a site was given one class'
        >>> nothing_learned("dice", {"A": 0.0, "B": 0.2})
        ''
    """
    known = [score for score in sites.values() if score is not None]
    if find_metric(metric).zero_is_nothing:
        return f"every test {find_metric(metric).title} is 0" if known and not any(known) else ""
    by_site: dict[str, list[float]] = {}
    for scores in (recalls or {}).values():
        for site, recall in scores.items():
            if recall is not None:
                by_site.setdefault(site, []).append(recall)
    several = [recalls_ for recalls_ in by_site.values() if len(recalls_) > 1]
    one_for_all = several and all(sorted(found) == [0.0] * (len(found) - 1) + [1.0] for found in several)
    return "every test image of a site was given one class" if one_for_all else ""


def nothing_learned_in(test: Mapping[str, Any]) -> str:
    """`nothing_learned` of the ``test`` of a ``results.json``."""
    entries: Mapping[str, Mapping[str, Any]] = test.get("sites", {})
    metrics = list(test.get("mean", {}))
    if not entries or not metrics:
        return ""
    recall = recall_metric()
    classes: Iterable[str] = dict.fromkeys(c for entry in entries.values() for c in entry.get("classes", {}))
    recalls = {
        name: {site: entry.get("classes", {}).get(name, {}).get(recall) for site, entry in entries.items()}
        for name in classes
    }
    first = metrics[0]
    return nothing_learned(first, {site: entry.get(first) for site, entry in entries.items()}, recalls)
