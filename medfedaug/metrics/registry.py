"""The metrics by name, with title, unit and direction; and what is made of the sites' scores."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import pstdev
from typing import Any

from medfedaug.errors import ConfigError
from medfedaug.metrics.base import MEAN, STAYS, Metric, mean_score
from medfedaug.utils import plugins
from medfedaug.utils.validation import not_known, number_or_none

__all__ = [
    "BUILT_IN_METRICS",
    "GLOBAL",
    "LOCAL",
    "METRICS",
    "PERSONAL",
    "UNITS",
    "UNSEEN",
    "Metric",
    "add_metric",
    "add_recorded",
    "described",
    "disparity",
    "find_metric",
    "leaves_by_default",
    "mean_score",
    "metric_names",
    "over_sites",
    "plugin_metric",
    "recall_metric",
    "score_of",
    "whose_model",
]

GLOBAL, PERSONAL, LOCAL, UNSEEN = "global", "personal", "local", "unseen"
"""Kinds of models that a score may be of (`medfedaug.federation.composition.Composition.scored`)."""


def whose_model(own: Collection[str]) -> str:
    """Name the model of a score: the global one, or a personal one with what is the site's own in it.

    >>> whose_model([]), whose_model(["own layers", "fine-tuned"])
    ('global', 'personal (own layers, fine-tuned)')
    """
    return f"{PERSONAL} ({', '.join(own)})" if own else GLOBAL


METRICS: dict[str, Metric] = {}
"""Metrics by name: those of this package, and those that other packages, Bundles and records added."""

UNITS = ("mm", "px", "mixed")
"""Units of a site's lengths: ``"px"`` where images have no spacing, ``"mixed"`` where some have one."""


def metric_names(task: str, further: Sequence[str] = (), without: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the metrics of a task's test, the one that chooses the round first.

    Args:
        task: ``"segmentation"`` or ``"classification"``.
        further: names of metrics that other packages add, which become known.
        without: names of metrics to leave out.

    Raises:
        ConfigError: for a name that is not known or is a metric of another task, for a package that may not
            or cannot be used, and where the metric that chooses the round is left out.

    Example:
        >>> metric_names("segmentation")[0]
        'dice'
        >>> "hd95" in metric_names("segmentation", without=["hd95"])
        False
    """
    own = sorted((m for m in _BUILT_IN.values() if m.task == task), key=lambda m: (m.position, m.name))
    for name in further:
        plugin = plugins.find(plugins.METRICS, name, BUILT_IN_METRICS)
        if plugin is None:
            known = plugins.names(plugins.METRICS, BUILT_IN_METRICS)
            problem = (
                f"is one of every {_BUILT_IN[name].task}" if name in _BUILT_IN else "is added by no package"
            )
            raise ConfigError(f"metric {name!r} {problem}; added ones: {', '.join(known) or 'none'}")
        metric = plugin_metric(plugin)
        if metric.task != task:
            raise ConfigError(f"metric {name} is for {metric.task}, and the run is a {task}")
        METRICS[name] = metric
    names = (*(metric.name for metric in own), *dict.fromkeys(further))
    for name in without:
        if name not in names[1:]:
            problem = "chooses the round and stays" if name == names[0] else not_known(name, names[1:])
            raise ConfigError(f"without_metrics: metric {name!r} {problem}")
    return tuple(name for name in names if name not in without)


def plugin_metric(plugin: plugins.Plugin) -> Metric:
    """Return the metric that a package adds.

    Raises:
        ConfigError: naming the package, when the object cannot be loaded or is no metric of that name.
    """
    found = plugin.load()
    if not isinstance(found, Metric):
        raise ConfigError(f"{plugin.what}: {found!r} is no medfedaug.metrics.base.Metric")
    if found.name != plugin.name:
        raise ConfigError(f"{plugin.what}: the metric must have that name, and has {found.name!r}")
    found.check_addition()
    return found


def recall_metric() -> str:
    """Return the name of the metric whose score of a class is its recall."""
    return next(metric.name for metric in METRICS.values() if metric.is_recall)


def add_metric(metric: Metric) -> bool:
    """Make a metric known that a Bundle brings along.

    Returns:
        Whether it is known now. It is not if its name means another direction in this process.

    Example:
        >>> add_metric(Metric("dice", "Dice", higher_is_better=False))
        False
    """
    return METRICS.setdefault(metric.name, metric).higher_is_better == metric.higher_is_better


def add_recorded(described: Mapping[str, Any]) -> None:
    """Make known what a ``results.json`` says of metrics that others brought along (`add_metric`).

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
    """Return the form in which a metric leaves that does not declare one: a share as a mean over cases."""
    return MEAN if largest <= 1 and not has_unit else STAYS


_RECORDED = ("name", "title", "higher_is_better", "largest", "has_unit", "cases")


def described(names: Iterable[str]) -> dict[str, Any]:
    """Describe metrics that others added, for a record that `add_recorded` reads.

    Returns:
        Under ``"metrics"`` a description of each; empty where there is none.

    Example:
        >>> described(["dice", "auc"])
        {}
    """
    found: dict[str, dict[str, Any]] = {}
    for metric in (METRICS[name] for name in names if name not in BUILT_IN_METRICS):
        meaning = {"meaning": metric.meaning} if metric.meaning else {}
        found[metric.name] = {key: getattr(metric, key) for key in _RECORDED} | meaning
    return {"metrics": found} if found else {}


def find_metric(name: str) -> Metric:
    """Return the metric of a name; one that another release or package named is taken for a share."""
    return METRICS.get(name) or Metric(name, name.replace("_", " ").capitalize())


def score_of(metric: str, value: Any) -> float | None:
    """Return a score that a metric can have; ``None`` for anything else, which may come from another site.

    >>> score_of("dice", 0.5), score_of("dice", 7), score_of("hd95", 7), score_of("hd95", float("inf"))
    (0.5, None, 7.0, None)
    """
    return float(value) if METRICS[metric].accepts(value) else None


def over_sites(sites: Mapping[str, Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    """Compute mean, worst site and disparity of each metric over the sites with a score, which count alike.

    The worst site is the one with the lowest score, or the highest where lower is better. Sites that measure
    a length in different units have none of these.

    Args:
        sites: the scores of each site by metric, with ``"unit"`` where there are lengths.
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
    found: dict[str, dict[str, Any]] = {"mean": {}, "worst": {}, "disparity": {}}
    for name in metrics:
        known = {site: scores[name] for site, scores in sites.items() if scores.get(name) is not None}
        if METRICS[name].has_unit and len({sites[site].get("unit") for site in known}) > 1:
            known = {}
        found["mean"][name] = mean_score(known.values())
        worst = METRICS[name].worst(known) if known else None
        found["worst"][name] = None if worst is None else {"site": worst, "value": known[worst]}
        found["disparity"][name] = disparity(known.values())
    return found


def disparity(scores: Collection[float]) -> dict[str, float] | None:
    """Return the spread of the sites' scores: population standard deviation, and highest minus lowest.

    >>> disparity([0.5, 0.75]), disparity([0.5])
    ({'std': 0.125, 'range': 0.25}, None)
    """
    if len(scores) < 2:
        return None
    return {"std": pstdev(scores), "range": max(scores) - min(scores)}


def _built_in() -> dict[str, Metric]:
    """Every object `METRIC` of a module of this package, by name."""
    package = __name__.rpartition(".")[0]
    modules = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    found = [getattr(importlib.import_module(f"{package}.{name}"), "METRIC", None) for name in modules]
    return {metric.name: metric for metric in found if isinstance(metric, Metric)}


# Last, since some of those modules import this one.
_BUILT_IN = _built_in()
METRICS.update(_BUILT_IN)
BUILT_IN_METRICS = frozenset(_BUILT_IN)
"""Names of the metrics of medfedaug itself, which no other package may take."""
