"""`ModelScore`: how well a model did in its run's test, for those who see its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from medfedaug.metrics.nothing_learned import nothing_learned_in
from medfedaug.metrics.registry import find_metric
from medfedaug.utils.printable import counted

LOW_DICE = 0.5
"""A test Dice below this is a reason to warn: less than half of outline and reference overlap."""

_DICE = "dice"


@dataclass(frozen=True)
class ModelScore:
    """Score of a model in the test of its own run, and the warning that follows from it.

    Args:
        score: with its extent, such as ``test Dice 0.83 (mean of 3 sites, lowest 0.71)``.
        warning: reason not to rely on a prediction; empty for none.
    """

    score: str
    warning: str = ""

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], site: str = "") -> ModelScore:
        """Sum up the tests of one model, or of the members of an ensemble, by the worst of them.

        Args:
            records: a ``results.json`` for each.
            site: the site whose score counts, if it was tested; otherwise the mean of all.
        """
        found = [_Tested.of(record, site) for record in records]
        worst = min(found, key=lambda one: (not one.warning, one.value is not None, one.value or 0.0))
        more = f"; the lowest of {len(found)} models" if len(found) > 1 else ""
        return cls(f"{worst.text}{more}", worst.warning)

    def record(self) -> dict[str, str]:
        """Return the content for ``predictions.json``."""
        return asdict(self)


@dataclass(frozen=True)
class _Tested:
    value: float | None
    text: str
    warning: str

    @classmethod
    def of(cls, record: Mapping[str, Any], site: str) -> _Tested:
        test = record.get("test") or {}
        metric = next(iter(test.get("mean", {})), "")
        sites, unseen = (
            {name: entry for name, entry in test.get(group, {}).items() if entry.get(metric) is not None}
            for group in ("sites", "unseen")
        )
        entries = unseen if site in unseen or not sites else sites  # the mean is of those that trained
        scores = {name: entry[metric] for name, entry in entries.items()}
        if not scores:
            return cls(None, "no test score", "the run has no test score: nobody measured this model")
        title = find_metric(metric).title
        own = site if site in scores else ""
        value = scores[site] if own else fmean(scores.values())
        mean = f"mean of {counted(len(scores), 'site')}, lowest {min(scores.values()):.2f}"
        text = f"test {title} {value:.2f} ({f'at {site}' if own else mean})"
        return cls(value, text, _warning(test, metric, value, [entries[own]] if own else [*entries.values()]))


def _warning(test: Mapping[str, Any], metric: str, value: float, entries: Sequence[Mapping[str, Any]]) -> str:
    """The reason to warn of a model with a score."""
    if reason := nothing_learned_in(test):
        return f"the model learned nothing: {reason}"
    if metric != _DICE:
        return ""
    if value < LOW_DICE:
        return f"in its test the model overlapped the reference with a Dice of {value:.2f} alone"
    by_class: dict[str, list[float]] = {}
    for entry in entries:
        for name, scores in entry.get("classes", {}).items():
            if scores.get(metric) is not None:
                by_class.setdefault(name, []).append(scores[metric])
    low = {name: mean for name, found in by_class.items() if (mean := fmean(found)) < LOW_DICE}
    if not low:
        return ""
    return "in its test the model missed classes: " + ", ".join(f"{n} Dice {v:.2f}" for n, v in low.items())
