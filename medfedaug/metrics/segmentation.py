"""`LabelMaps`: prediction and truth of a case; `LabelMapScores`: the scores that metrics make of them."""

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
    """The lengths of a voxel's edges: the columns of the affine; 1 without one.

    Args:
        affine: (4, 4), from voxels to millimetres; a shear is not seen in it.
        dims: number of axes.

    Example:
        >>> import torch
        >>> voxel_edges(torch.tensor([[0, -2, 0, 7], [0.5, 0, 0, 8], [0, 0, 3, 9], [0, 0, 0, 1.0]]))
        (0.5, 2.0, 3.0)
    """
    if affine is None:
        return (1.0,) * dims
    return tuple(affine[:3, :dims].double().norm(dim=0).tolist())


def surface_distances(predicted: Tensor, truth: Tensor, edges: Sequence[float]) -> Distances | None:
    r"""Distances between the surfaces of one structure as predicted and as it is.

    With the surface voxels :math:`S` of a structure, those with a face on the outside (as MONAI's metrics
    define them), they are :math:`d(s, S') = \min_{s' \in S'} \lVert s - s' \rVert` between the centres.

    Args:
        predicted: (\*spatial), boolean, in two or three dimensions.
        truth: the same.
        edges: the lengths of a voxel's edges.

    Returns:
        Of each surface voxel of the prediction, and of the truth, the distance to the other surface in the
        unit of ``edges``; ``None`` where one of the two has no surface.

    Deviations:
        The metrics of these distances are those of `monai.metrics.compute_hausdorff_distance` and
        `monai.metrics.compute_surface_dice`, which measure every distance twice and search a tree of surface
        voxels: with scattered predictions, as of an untrained network, that takes twenty times as long as the
        distance transform here. Surfaces are found by the same erosion (SciPy's), without MONAI's transforms
        around it, which take four to twenty times as long for small images.
    """
    from scipy import ndimage  # imported here: commands that compute nothing import this module

    masks = np.asarray(predicted), np.asarray(truth)
    if not all(mask.any() for mask in masks):
        return None
    # Both surfaces lie within the box of the two structures.
    (box,) = ndimage.find_objects((masks[0] | masks[1]).astype(np.uint8))
    one, two = (mask[box] & ~ndimage.binary_erosion(mask[box]) for mask in masks)
    of_one, of_two = (ndimage.distance_transform_edt(~surface, sampling=edges) for surface in (one, two))
    return of_two[one], of_one[two]


class LabelMaps:
    r"""Prediction and truth of a case, as metrics see them.

    Args:
        predicted: label map, (1, \*spatial), on the device of the network.
        truth: the same, on the CPU.
        classes: names, the background first.
        affine: (4, 4), from voxels to millimetres; ``None`` where the file does not say.
        tolerance: distance up to which two surfaces count as one, in millimetres, without an affine in
            pixels.
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
        """The axes that surfaces have: without those of length 1, of which two axes at least remain."""
        shape = self.truth.shape[1:]
        kept = list(range(len(shape)))
        for axis in reversed(kept.copy()):
            if shape[axis] == 1 and len(kept) > 2:
                kept.remove(axis)
        return kept

    @cached_property
    def _planes(self) -> list[Tensor]:
        """Prediction and truth on the CPU; a volume of one slice is a plane, whose surface is its outline."""
        shape = [self.truth.shape[1 + axis] for axis in self._axes]
        return [value[0].cpu().reshape(shape) for value in (self.predicted, self.truth)]

    def structure(self, index: int) -> tuple[Tensor, Tensor]:
        r"""Return the voxels of a class as predicted and as they are, boolean, (\*spatial)."""
        predicted, truth = self._planes
        return predicted == index, truth == index

    def surface_distances(self, index: int) -> Distances | None:
        """Return `surface_distances` of a class, computed once for all metrics."""
        if index not in self._distances:
            self._distances[index] = surface_distances(*self.structure(index), self.edges)
        return self._distances[index]

    def misses(self, index: int) -> bool:
        """Return whether a class that is there was not predicted at all."""
        predicted, truth = self.structure(index)
        return bool(truth.any()) and not bool(predicted.any())

    @property
    def undivided(self) -> bool:
        """Return whether the truth has several classes, and the prediction one alone or no background."""
        (least, most), (lowest, highest) = (map(int, plane.aminmax()) for plane in self._planes)
        return lowest < highest and (least == most or least > lowest == 0)


class LabelMapScores:
    """Scores of the label maps of a site, gathered case by case.

    A class that is absent in a case's truth has no score there, whatever was predicted. One that is there and
    was not predicted at all is counted as missed; a metric that is infinite then, such as HD95, has no score
    for it. A case is counted as undivided where the network drew no outline in it (`LabelMaps.undivided`). A
    site's score is the mean over its cases.

    Args:
        classes: names, the background first.
        tolerance: of surfaces, in millimetres; in pixels for cases without an affine.
        metrics: names in `medfedaug.metrics.registry.METRICS`.
        full: whether all metrics are scored, and classes, or the cases of the first metric alone.
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
            case: its name.
            predicted: label map, (1, \*spatial).
            label: the truth, the same.
            affine: (4, 4), from voxels to millimetres.
            owner: whose it is; by default that of no other case.
            annotated: whether the case has each class but the background annotated; by default all.
        """
        chosen = self.classes[1:] if annotated is None else compress(self.classes[1:], annotated)
        self.annotated.update(chosen)
        self.partial |= annotated is not None
        maps = LabelMaps(predicted, label, self.classes, affine, self.tolerance)
        self.owners.append(owner or case)
        self.units.add(maps.unit)
        for metric in self.metrics:
            found: CaseScores = metric.scores(maps)
            self.cases[metric.name][case] = found.score
            if not self.full or not metric.by_class:
                continue
            if len(found.classes) != len(self.by_class):
                raise ConfigError(
                    f"metric {metric.name}: scores of {len(found.classes)} classes, and there are "
                    f"{len(self.by_class)}"
                )
            for label_scores, score in zip(self.by_class.values(), found.classes, strict=True):
                label_scores[metric.name].append(score)
        if self.full:
            for index, name in enumerate(self.missed, start=1):
                self.missed[name] += maps.misses(index)
            self.undivided += maps.undivided

    def result(self) -> dict[str, Any]:
        """The scores, as `medfedaug.tasks.base.Task.evaluate` returns them."""
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
        """By class the score of each case that has it: where sites differ in these, each is judged alone."""
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
        """Means over the cases, and the ends of their 95% intervals; no lengths where units are mixed."""
        scores = self.by_class[label]
        found: dict[str, Any] = {name: mean_score(values) for name, values in scores.items()}
        found["missed"] = self.missed[label]
        for name, values in scores.items():
            known = [(v, owner) for v, owner in zip(values, self.owners, strict=True) if v is not None]
            found |= interval_ends(METRICS[name], known)
        for name in lengths:
            found |= dict.fromkeys(found.keys() & {name, f"{name}_low", f"{name}_high"})
        return found
