"""`ModelScore`: a model's score in its run's test, for readers of its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from medfedaug.metrics.nothing_learned import nothing_learned_in
from medfedaug.metrics.registry import find_metric
from medfedaug.utils.printable import counted

LOW_DICE = 0.5
"""Warn of a test Dice below this: outline and reference overlap by less than half."""

_DICE = "dice"


@dataclass(frozen=True)
class ModelScore:
    """Score of a model in its run's test, and the reason not to rely on a prediction, if any.

    A score has its extent, such as ``test Dice 0.83 (mean of 3 sites, lowest 0.71)``.
    """

    score: str
    warning: str = ""

    @classmethod
    def of(cls, record: Mapping[str, Any], site: str = "") -> ModelScore:
        """Summarise the test of a run, from its ``results.json``.

        The score of the site counts, if it was tested; otherwise the mean of all sites.
        """
        test = record.get("test") or {}
        metric = next(iter(test.get("mean", {})), "")
        sites, unseen = (
            {name: entry for name, entry in test.get(group, {}).items() if entry.get(metric) is not None}
            for group in ("sites", "unseen")
        )
        entries = unseen if site in unseen or not sites else sites  # unseen sites do not count in the mean
        scores = {name: entry[metric] for name, entry in entries.items()}
        if not scores:
            return cls("no test score", "the run has no test score: nobody measured this model")
        title = find_metric(metric).title
        if site in scores:
            value, extent, counted_entries = scores[site], f"at {site}", [entries[site]]
        else:
            value, counted_entries = fmean(scores.values()), [*entries.values()]
            extent = f"mean of {counted(len(scores), 'site')}, lowest {min(scores.values()):.2f}"
        text = f"test {title} {value:.2f} ({extent})"
        return cls(text, _warning(test, metric, value, counted_entries))


def _warning(test: Mapping[str, Any], metric: str, value: float, entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason to warn of a model with a score."""
    if reason := nothing_learned_in(test):
        return f"the model learned nothing: {reason}"
    if metric != _DICE:
        return ""
    if value < LOW_DICE:
        return f"in its test the model overlapped the reference with a Dice of only {value:.2f}"
    by_class: dict[str, list[float]] = {}
    for entry in entries:
        for name, scores in entry.get("classes", {}).items():
            if scores.get(metric) is not None:
                by_class.setdefault(name, []).append(scores[metric])
    means = {name: fmean(scores) for name, scores in by_class.items()}
    low = ", ".join(f"{name} Dice {mean:.2f}" for name, mean in means.items() if mean < LOW_DICE)
    return f"in its test the model missed classes: {low}" if low else ""
