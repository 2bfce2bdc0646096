"""`LabelMapScores`: scores of the label maps of a site, gathered case by case."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from medfedaug.metrics.base import CaseScores, mean_score
from medfedaug.metrics.label_maps import LabelMaps
from medfedaug.metrics.registry import METRICS
from medfedaug.metrics.significance import interval_ends
from medfedaug.utils.validation import number_or_none

if TYPE_CHECKING:
    from torch import Tensor

VOLUME_RATIO = "volume_ratio"
"""Entry of a class in a site's test scores: its predicted voxels over the outlined ones, of all cases."""

_MANY = 3.0


class LabelMapScores:
    """Scores of the label maps of a site, gathered case by case.

    A class that is absent in a case's truth has no score there. A class of the truth that was not predicted
    at all is counted as missed; a metric that is infinite then, such as HD95, has no score for it. A case
    without any predicted outline is counted as undivided (`LabelMaps.undivided`). A site's score is the mean
    over its cases.

    Args:
        classes: names, the background first.
        tolerance: tolerance of surfaces, in millimetres; in pixels for cases without an affine.
        metrics: names in `medfedaug.metrics.registry.METRICS`.
        full: scores all metrics and classes, not only the cases of the first metric.
    """

    def __init__(
        self, classes: Sequence[str], tolerance: float, metrics: Sequence[str], *, full: bool
    ) -> None:
        self.classes, self.tolerance, self.full = tuple(classes), tolerance, full
        self.metrics = [METRICS[name] for name in (metrics if full else metrics[:1])]
        self.cases: dict[str, dict[str, float | None]] = {metric.name: {} for metric in self.metrics}
        self.by_class: dict[str, dict[str, list[float | None]]] = {
            label: {metric.name: [] for metric in self.metrics if metric.by_class}
            for label in self.classes[1:]
        }
        self.missed = dict.fromkeys(self.classes[1:], 0)
        self.voxels = {label: [0, 0] for label in self.classes[1:]}  # predicted, outlined
        self.annotated: set[str] = set()
        self.partial = False
        self.undivided = 0
        self.units: set[str] = set()
        self.owners: list[Hashable] = []

    def add(
        self,
        case: str,
        predicted: Tensor,
        label: Tensor,
        affine: Tensor | None,
        owner: Hashable = None,
        annotated: Sequence[bool] | None = None,
    ) -> None:
        r"""Score a case by its label map and the truth, (1, \*spatial) each.

        ``annotated`` says of each class but the background whether the case has it annotated; by default all.
        """
        labels = self.classes[1:]
        outlined = labels if annotated is None else tuple(compress(labels, annotated))
        self.annotated.update(outlined)
        self.partial |= annotated is not None
        maps = LabelMaps(predicted, label, self.classes, affine, self.tolerance)
        self.owners.append(owner or case)
        self.units.add(maps.unit)
        for metric in self.metrics:
            scores: CaseScores = metric.scores(maps)
            self.cases[metric.name][case] = scores.score
            if not self.full or not metric.by_class:
                continue
            for label_scores, score in zip(self.by_class.values(), scores.classes, strict=True):
                label_scores[metric.name].append(score)
        if self.full:
            for index, name in enumerate(self.missed, start=1):
                self.missed[name] += maps.misses(index)
                if name in outlined:
                    for place, mask in enumerate(maps.structure(index)):
                        self.voxels[name][place] += int(mask.sum())
            self.undivided += maps.undivided

    def result(self) -> dict[str, Any]:
        """Return the scores, as `medfedaug.tasks.base.Task.evaluate`."""
        first = self.metrics[0].name
        if not self.full:
            return {first: mean_score(self.cases[first].values()), "cases": self.cases[first]}
        mixed = len(self.units) > 1  # millimetres and pixels have no mean
        lengths = {metric.name for metric in self.metrics if mixed and metric.has_unit}
        return {
            **{
                name: None if name in lengths else mean_score(scores.values())
                for name, scores in self.cases.items()
            },
            "missed": sum(self.missed.values()),
            "undivided": self.undivided,
            "unit": "mixed" if mixed else next(iter(self.units), None),
            "classes": {
                label: self._of_class(label, lengths) for label in self.by_class if label in self.annotated
            },
            "cases": self.cases[first],
            "case_metrics": {name: scores for name, scores in self.cases.items() if name != first},
            **({"case_classes": self._case_classes(first)} if self.partial else {}),
        }

    def _case_classes(self, metric: str) -> dict[str, dict[str, float]]:
        """Return the score of each case by class: classes are judged alone if sites differ in them."""
        return {
            label: {
                case: score
                for case, score in zip(self.cases[metric], self.by_class[label].get(metric, ()), strict=False)
                if score is not None
            }
            for label in self.by_class
            if label in self.annotated
        }

    def _of_class(self, label: str, lengths: set[str]) -> dict[str, Any]:
        """Return means over the cases and ends of their 95% intervals; no lengths in mixed units."""
        scores = self.by_class[label]
        entry: dict[str, Any] = {name: mean_score(values) for name, values in scores.items()}
        entry["missed"] = self.missed[label]
        predicted, outlined = self.voxels[label]
        if outlined:
            entry[VOLUME_RATIO] = predicted / outlined
        for name, values in scores.items():
            known = [(v, owner) for v, owner in zip(values, self.owners, strict=True) if v is not None]
            entry |= interval_ends(METRICS[name], known)
        for name in lengths:
            entry |= dict.fromkeys(entry.keys() & {name, f"{name}_low", f"{name}_high"})
        return entry


def oversized_in(test: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each site at which a model marks structures many times as large as outlined.

    Example:
        >>> oversized_in({"sites": {"A": {"classes": {"lesion": {"volume_ratio": 41.6}}}}})
        ['A: the model marks lesion 42 times as large as outlined.']
    """
    sentences = []
    for site, entry in {**test.get("sites", {}), **test.get("unseen", {})}.items():
        ratios = {name: number_or_none(of.get(VOLUME_RATIO)) for name, of in entry.get("classes", {}).items()}
        large = [f"{name} {ratio:.0f} times" for name, ratio in ratios.items() if ratio and ratio >= _MANY]
        if large:
            sentences.append(f"{site}: the model marks {', '.join(large)} as large as outlined.")
    return sentences
