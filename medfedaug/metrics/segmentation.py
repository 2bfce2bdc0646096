"""`LabelMaps`: prediction and truth of a case; `LabelMapScores`: their scores."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from medfedaug.errors import ConfigError
from medfedaug.metrics.base import CaseScores, mean_score
from medfedaug.metrics.registry import METRICS
from medfedaug.metrics.significance import interval_ends

if TYPE_CHECKING:
    from torch import Tensor

Distances = tuple[np.ndarray, np.ndarray]


def voxel_edges(affine: Tensor | None, dims: int = 3) -> tuple[float, ...]:
    """Return the lengths of a voxel's edges: the norms of the affine's columns; 1 without an affine.

    Args:
        affine: (4, 4), from voxels to millimetres; a shear is ignored.

    Example:
        >>> import torch
        >>> voxel_edges(torch.tensor([[0, -2, 0, 7], [0.5, 0, 0, 8], [0, 0, 3, 9], [0, 0, 0, 1.0]]))
        (0.5, 2.0, 3.0)
    """
    if affine is None:
        return (1.0,) * dims
    return tuple(affine[:3, :dims].double().norm(dim=0).tolist())


def surface_distances(predicted: Tensor, truth: Tensor, edges: Sequence[float]) -> Distances | None:
    r"""Compute the distances between the predicted and the true surface of a structure.

    With the surface voxels S of a structure, which have a face on the outside (as in MONAI's
    metrics), they are ``d(s, S′) = min_(s′∈S′) ‖s − s′‖`` between the centres.

    Args:
        predicted: (\*spatial), boolean, in two or three dimensions.

    Returns:
        The distance of each surface voxel of the prediction, and of the truth, to the other surface in the
        unit of ``edges``; ``None`` if one of the two has no surface.

    Deviations:
        The distances give the metrics of `monai.metrics.compute_hausdorff_distance` and
        `monai.metrics.compute_surface_dice`, which measure every distance twice and search a tree of surface
        voxels: with scattered predictions of an untrained network this takes twenty times as long as the
        distance transform here. The same erosion (SciPy's) gives the surfaces, without MONAI's transforms
        around it, which take four to twenty times as long for small images.
    """
    from scipy import ndimage  # light commands import this module

    masks = np.asarray(predicted), np.asarray(truth)
    if not all(mask.any() for mask in masks):
        return None
    # Both surfaces lie within the box of the two structures.
    (box,) = ndimage.find_objects((masks[0] | masks[1]).astype(np.uint8))
    surfaces = [mask[box] & ~ndimage.binary_erosion(mask[box]) for mask in masks]
    to_predicted, to_truth = (ndimage.distance_transform_edt(~s, sampling=edges) for s in surfaces)
    return to_truth[surfaces[0]], to_predicted[surfaces[1]]


class LabelMaps:
    r"""Prediction and truth of a case, for metrics.

    Args:
        predicted: label map, (1, \*spatial), on the device of the network.
        truth: label map, (1, \*spatial), on the CPU.
        classes: names, the background first.
        affine: (4, 4), from voxels to millimetres, if known.
        tolerance: largest distance between equal surfaces, in millimetres, without an affine in pixels.
    """

    def __init__(
        self,
        predicted: Tensor,
        truth: Tensor,
        classes: Sequence[str],
        affine: Tensor | None,
        tolerance: float,
    ) -> None:
        self.predicted, self.truth, self.classes = predicted, truth, tuple(classes)
        self.affine, self.tolerance = affine, tolerance
        self._distances: dict[int, Distances | None] = {}

    @property
    def unit(self) -> str:
        """The unit of lengths: ``"mm"``, or ``"px"`` without an affine."""
        return "px" if self.affine is None else "mm"

    @cached_property
    def edges(self) -> list[float]:
        """The lengths of a voxel's edges, along the axes of `structure`."""
        edges = voxel_edges(self.affine, self.truth.ndim - 1)
        return [edges[axis] for axis in self._axes]

    @cached_property
    def _axes(self) -> list[int]:
        """The axes of surfaces: without axes of length 1, but at least two."""
        shape = self.truth.shape[1:]
        axes = list(range(len(shape)))
        for axis in reversed(range(len(shape))):
            if shape[axis] == 1 and len(axes) > 2:
                axes.remove(axis)
        return axes

    @cached_property
    def _planes(self) -> list[Tensor]:
        """Prediction and truth on the CPU; a volume of one slice is a plane, whose surface is its outline."""
        shape = [self.truth.shape[1 + axis] for axis in self._axes]
        return [value[0].cpu().reshape(shape) for value in (self.predicted, self.truth)]

    def structure(self, index: int) -> tuple[Tensor, Tensor]:
        r"""Return the predicted and the true voxels of a class, boolean, (\*spatial)."""
        predicted, truth = self._planes
        return predicted == index, truth == index

    def surface_distances(self, index: int) -> Distances | None:
        """Return `surface_distances` of a class, computed once for all metrics."""
        if index not in self._distances:
            self._distances[index] = surface_distances(*self.structure(index), self.edges)
        return self._distances[index]

    def misses(self, index: int) -> bool:
        """Return whether a class of the truth was not predicted at all."""
        predicted, truth = self.structure(index)
        return bool(truth.any()) and not bool(predicted.any())

    @property
    def undivided(self) -> bool:
        """True if the truth has several classes, and the prediction only one or no background."""
        (least, most), (lowest, highest) = (map(int, plane.aminmax()) for plane in self._planes)
        return lowest < highest and (least == most or least > lowest == 0)


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
        r"""Score a case.

        Args:
            predicted: label map, (1, \*spatial).
            label: the truth, (1, \*spatial).
            affine: (4, 4), from voxels to millimetres.
            annotated: for each class but the background, whether the case has it annotated; by default all.
        """
        labels = self.classes[1:]
        self.annotated.update(labels if annotated is None else compress(labels, annotated))
        self.partial |= annotated is not None
        maps = LabelMaps(predicted, label, self.classes, affine, self.tolerance)
        self.owners.append(owner or case)
        self.units.add(maps.unit)
        for metric in self.metrics:
            scores: CaseScores = metric.scores(maps)
            self.cases[metric.name][case] = scores.score
            if not self.full or not metric.by_class:
                continue
            if len(scores.classes) != len(self.by_class):
                numbers = f"{len(scores.classes)} classes, expected {len(self.by_class)}"
                raise ConfigError(f"metric {metric.name}: scores of {numbers}")
            for label_scores, score in zip(self.by_class.values(), scores.classes, strict=True):
                label_scores[metric.name].append(score)
        if self.full:
            for index, name in enumerate(self.missed, start=1):
                self.missed[name] += maps.misses(index)
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
        for name, values in scores.items():
            known = [(v, owner) for v, owner in zip(values, self.owners, strict=True) if v is not None]
            entry |= interval_ends(METRICS[name], known)
        for name in lengths:
            entry |= dict.fromkeys(entry.keys() & {name, f"{name}_low", f"{name}_high"})
        return entry
