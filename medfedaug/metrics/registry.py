"""The metrics by name, with title, unit and direction; and what is made of the sites' scores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import pstdev
from typing import Any

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
    "mean_score",
    "over_sites",
    "score_of",
    "whose_model",
]

GLOBAL, PERSONAL, LOCAL, UNSEEN = "global", "personal", "local", "unseen"
"""Whose model a score is of (`medfedaug.federation.composition.Composition.scored`)."""


def whose_model(own: Collection[str]) -> str:
    """Whether a score is of the global model, or of a personal one, and what of that is the site's own.

    >>> whose_model([]), whose_model(["own layers", "fine-tuned"])
    ('global', 'personal (own layers, fine-tuned)')
    """
    return f"{PERSONAL} ({', '.join(own)})" if own else GLOBAL


_NAMES = ("Dice", "Jaccard", "Hausdorff")  # of people


@dataclass(frozen=True)
class Metric:
    """What is known of a metric wherever its numbers are shown or compared.

    Attributes:
        name: as in ``results.json``.
        title: for a reader.
        higher_is_better: its direction.
        largest: no score lies above it; the smallest is 0.
        has_unit: whether it is a length, in the unit that the site names (`UNITS`).
        cases: what is scored, ``"patients"`` or ``"images"``.
    """

    name: str
    title: str
    higher_is_better: bool = True
    largest: float = 1.0
    has_unit: bool = False
    cases: str = "images"

    @property
    def in_text(self) -> str:
        """The title within a sentence: what is neither a name nor an abbreviation is written small.

        Example:
            >>> [METRICS[name].in_text for name in ("dice", "auc", "balanced_accuracy")]
            ['Dice', 'AUC', 'balanced accuracy']
        """
        first, *others = self.title.split(" ")
        word = first[1:].islower() and first not in _NAMES
        return " ".join([first.lower() if word else first, *others])

    def worst(self, scores: Mapping[str, float]) -> str:
        """Where the worst score is, of equal ones the first by name."""
        return (min if self.higher_is_better else max)(sorted(scores), key=lambda name: scores[name])


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("dice", "Dice", cases="patients"),
        # Beyond the diagonal of any volume that a scanner takes, in millimetres or in voxels.
        Metric("hd95", "HD95", higher_is_better=False, largest=1e5, has_unit=True, cases="patients"),
        Metric("nsd", "NSD", cases="patients"),
        Metric("accuracy", "Accuracy"),
        Metric("balanced_accuracy", "Balanced accuracy"),
        Metric("auc", "AUC"),
    )
}
"""Every metric of every task, with those that Bundles added (`add_metric`)."""

BUILT_IN_METRICS = frozenset(METRICS)
"""Those that are medfedaug's own."""

UNITS = ("mm", "px", "mixed")
"""Of a site's lengths: ``"px"`` where the images have no spacing, ``"mixed"`` where some have one."""


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
    """Make known what a ``results.json`` says of metrics that a Bundle brought along (`add_metric`).

    Example:
        >>> add_recorded({"distance": {"title": "Distance", "higher_is_better": False, "largest": 1e5}})
        >>> find_metric("distance").higher_is_better
        False
    """
    for name, told in described.items():
        if not isinstance(told, Mapping):
            continue
        largest = told.get("largest")
        add_metric(
            Metric(
                str(name),
                str(told.get("title", name)),
                told.get("higher_is_better") is not False,
                float(largest) if isinstance(largest, int | float) and largest > 0 else 1.0,
                cases=str(told.get("cases", "images")),
            )
        )


def described(names: Iterable[str]) -> dict[str, Any]:
    """What a record says of metrics that are none of this package's, for `add_recorded`.

    Returns:
        Under ``"metrics"`` what is known of each of them; empty where there is none.

    Example:
        >>> described(["dice", "auc"])
        {}
    """
    added = [METRICS[name] for name in names if name not in BUILT_IN_METRICS]
    return {"metrics": {metric.name: asdict(metric) for metric in added}} if added else {}


def find_metric(name: str) -> Metric:
    """What is known of a metric; one that another release or package named is taken for a share."""
    return METRICS.get(name) or Metric(name, name.replace("_", " ").capitalize())


def score_of(metric: str, value: Any) -> float | None:
    """A score that a metric can have; ``None`` for anything else, which may come from another site.

    >>> score_of("dice", 0.5), score_of("dice", 7), score_of("hd95", 7), score_of("hd95", float("inf"))
    (0.5, None, 7.0, None)
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value <= METRICS[metric].largest else None


def mean_score(scores: Iterable[float | None]) -> float | None:
    """The mean of the scores that are known; ``None`` where none is.

    Example:
        >>> mean_score([0.5, None, 1.0]), mean_score([None])
        (0.75, None)
    """
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else None


def over_sites(sites: Mapping[str, Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    """Mean, worst site and disparity of each metric over the sites that have a score, with equal weights.

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
    """How far the sites' scores lie apart: population standard deviation, and highest minus lowest.

    >>> disparity([0.5, 0.75]), disparity([0.5])
    ({'std': 0.125, 'range': 0.25}, None)
    """
    if len(scores) < 2:
        return None
    return {"std": pstdev(scores), "range": max(scores) - min(scores)}
