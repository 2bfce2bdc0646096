"""Metrics by name, their titles, units and directions; summaries of scores, and signs of nothing learned."""

import importlib
import pkgutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import pstdev
from typing import Any

from medfedaug.metrics.base import MEAN, STAYS, Metric, mean_score
from medfedaug.utils.validation import number_or_none

GLOBAL, PERSONAL, LOCAL, UNSEEN = "global", "personal", "local", "unseen"
"""Kinds of scored models (`medfedaug.federation.composition.Composition.scored`)."""

REMEDIES = (
    "Likely remedies: more rounds or local epochs, another learning rate, patches around the foreground "
    "(--plan auto), and a look at the label maps (medfedaug inspect); docs/howto/diverges.md has the list."
)
"""Remedies, for a reader of a page or a terminal."""

_SHOWN = 0.0005  # three digits of it are not 0


def whose_model(parts: Collection[str]) -> str:
    """Name the model of a score: the global one, or a personal one with the site's own parts.

    >>> whose_model([]), whose_model(["own layers", "fine-tuned"])
    ('global', 'personal (own layers, fine-tuned)')
    """
    return f"{PERSONAL} ({', '.join(parts)})" if parts else GLOBAL


METRICS: dict[str, Metric] = {}
"""Metrics by name: of this package, and added by Bundles and records."""

UNITS = ("mm", "px", "mixed")
"""Units of a site's lengths: ``"px"`` for images without spacing, ``"mixed"`` if some have one."""


def metric_names(task: str) -> tuple[str, ...]:
    """Return the names of the metrics of a task's test, the one that chooses the round first.

    Example:
        >>> metric_names("segmentation")[0]
        'dice'
    """
    built_in = sorted((m for m in _BUILT_IN.values() if m.task == task), key=lambda m: (m.position, m.name))
    return tuple(metric.name for metric in built_in)


def add_metric(metric: Metric) -> bool:
    """Register the metric of a Bundle.

    Returns:
        ``False`` if its name has another direction in this process.

    Example:
        >>> add_metric(Metric("dice", "Dice", higher_is_better=False))
        False
    """
    return METRICS.setdefault(metric.name, metric).higher_is_better == metric.higher_is_better


def add_recorded(described: Mapping[str, Any]) -> None:
    """Register metrics from the descriptions of a ``results.json`` (`add_metric`).

    Example:
        >>> add_recorded({"distance": {"title": "Distance", "higher_is_better": False, "largest": 1e5}})
        >>> find_metric("distance").higher_is_better
        False
    """
    for name, entry in described.items():
        if not isinstance(entry, Mapping):
            continue
        recorded = number_or_none(entry.get("largest")) or 0.0
        largest = recorded if recorded > 0 else 1.0
        has_unit = entry.get("has_unit") is True
        add_metric(
            Metric(
                str(name),
                str(entry.get("title", name)),
                entry.get("higher_is_better") is not False,
                largest,
                has_unit,
                str(entry.get("cases", "images")),
                leaves=leaves_by_default(largest, has_unit=has_unit),
                meaning=str(entry.get("meaning", "")),
            )
        )


def leaves_by_default(largest: float, *, has_unit: bool = False) -> str:
    """Return the default form in which a metric leaves: a share as a mean over cases."""
    return MEAN if largest <= 1 and not has_unit else STAYS


_RECORDED = ("name", "title", "higher_is_better", "largest", "has_unit", "cases")


def described(names: Iterable[str]) -> dict[str, Any]:
    """Describe added metrics for a record that `add_recorded` reads.

    Returns:
        ``"metrics"`` with a description of each; empty without added metrics.

    Example:
        >>> described(["dice", "auc"])
        {}
    """
    entries: dict[str, dict[str, Any]] = {}
    for metric in (METRICS[name] for name in names if name not in _BUILT_IN):
        meaning = {"meaning": metric.meaning} if metric.meaning else {}
        entries[metric.name] = {key: getattr(metric, key) for key in _RECORDED} | meaning
    return {"metrics": entries} if entries else {}


def find_metric(name: str) -> Metric:
    """Return the metric of a name; an unknown name is taken for a share."""
    return METRICS.get(name) or Metric(name, name.replace("_", " ").capitalize())


def score_of(metric: str, value: Any) -> float | None:
    """Return a score that a metric can have; ``None`` for any other value, which may come from a site.

    >>> score_of("dice", 0.5), score_of("dice", 7), score_of("hd95", 7), score_of("hd95", float("inf"))
    (0.5, None, 7.0, None)
    """
    return float(value) if METRICS[metric].accepts(value) else None


def over_sites(sites: Mapping[str, Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    """Compute mean, worst site and disparity of each metric over the sites with a score, which count alike.

    The worst site has the lowest score, or the highest if lower is better. Sites that measure a length in
    different units have none of these.

    Args:
        sites: the scores of each site by metric, with ``"unit"`` of lengths.
        metrics: names in `METRICS`.

    Returns:
        ``"mean"`` by metric; ``"worst"`` by metric, with ``"site"`` and ``"value"``; ``"disparity"`` by
        metric, with ``"std"`` and ``"range"``.

    Example:
        >>> found = over_sites({"A": {"dice": 0.5}, "B": {"dice": 0.75}, "C": {"dice": None}}, ["dice"])
        >>> found["mean"], found["worst"]
        ({'dice': 0.625}, {'dice': {'site': 'A', 'value': 0.5}})
        >>> found["disparity"]
        {'dice': {'std': 0.125, 'range': 0.25}}
    """
    results: dict[str, dict[str, Any]] = {"mean": {}, "worst": {}, "disparity": {}}
    for name in metrics:
        known = {site: scores[name] for site, scores in sites.items() if scores.get(name) is not None}
        if METRICS[name].has_unit and len({sites[site].get("unit") for site in known}) > 1:
            known = {}
        results["mean"][name] = mean_score(known.values())
        worst = METRICS[name].worst(known) if known else None
        results["worst"][name] = None if worst is None else {"site": worst, "value": known[worst]}
        results["disparity"][name] = disparity(known.values())
    return results


def disparity(scores: Collection[float]) -> dict[str, float] | None:
    """Return the spread of the sites' scores: population standard deviation, and highest minus lowest.

    >>> disparity([0.5, 0.75]), disparity([0.5])
    ({'std': 0.125, 'range': 0.25}, None)
    """
    if len(scores) < 2:
        return None
    return {"std": pstdev(scores), "range": max(scores) - min(scores)}


def _built_in() -> dict[str, Metric]:
    """Return each `Metric` of the modules of this package, by name."""
    package = __name__.rpartition(".")[0]
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    objects = [v for name in names for v in vars(importlib.import_module(f"{package}.{name}")).values()]
    return {metric.name: metric for metric in objects if isinstance(metric, Metric)}


# Last, since some of these modules import this one.
_BUILT_IN = _built_in()
METRICS.update(_BUILT_IN)


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
