"""`LabelMaps`: prediction and truth of a case, and their metrics: Dice, HD95, NSD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from medfedaug.metrics.base import MEAN, CaseScores, Metric, mean_of_classes

if TYPE_CHECKING:
    from torch import Tensor

Distances = tuple[np.ndarray, np.ndarray]


def voxel_edges(affine: Tensor | None, dims: int = 3) -> tuple[float, ...]:
    """Return the lengths of a voxel's edges: the norms of the affine's columns; 1 without an affine.

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

    Both are label maps, (1, \*spatial), the prediction on the device of the network, the truth on the CPU;
    the background is the first class. ``tolerance``, the largest distance between equal surfaces, is in
    millimetres, or in pixels without an affine.
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


def _dice(maps: LabelMaps) -> CaseScores:
    """Compute MONAI's Dice, without the background; a class that is absent in the truth has none."""
    from monai.metrics import DiceMetric
    from monai.networks.utils import one_hot

    metric, count = DiceMetric(include_background=False, reduction="mean"), len(maps.classes)
    predicted, truth = maps.predicted[None], maps.truth[None].to(maps.predicted.device)
    metric(y_pred=one_hot(predicted, count), y=one_hot(truth, count))
    shares = metric.aggregate(reduction="none")[0].tolist()
    # MONAI also reports 0 without any score; the truth distinguishes the two.
    score = float(metric.aggregate()) if bool(maps.truth.any()) else None  # type: ignore[arg-type]
    return CaseScores(score, [None if math.isnan(share) else share for share in shares])


DICE = Metric(
    "dice",
    "Dice",
    cases="patients",
    task="segmentation",
    compute=_dice,
    leaves=MEAN,
    position=0,
    zero_is_nothing=True,
    meaning="agreement of two regions: twice their intersection, divided by the sum of their sizes. 1 is "
    "perfect, 0 is nothing in common.",
)


def _hd95(maps: LabelMaps, index: int) -> float | None:
    """Compute the 95% Hausdorff distance of a class.

    ::

        HD95 = max{P₉₅(d(Sₚ, Sₜ)), P₉₅(d(Sₜ, Sₚ))}

    with the distances d between the surfaces S of prediction and truth
    (`surface_distances`), and P₉₅ the 95th percentile, linear between
    neighbours. Without a truth or a prediction it is ``None``.
    """
    distances = maps.surface_distances(index)
    return None if distances is None else max(float(np.percentile(side, 95)) for side in distances)


HD95 = Metric(
    "hd95",
    "HD95",
    higher_is_better=False,
    # Beyond the diagonal of any scanner's volume, in millimetres or in voxels.
    largest=1e5,
    has_unit=True,
    cases="patients",
    task="segmentation",
    compute=mean_of_classes(_hd95),
    position=1,
    skips_missed=True,
    meaning="the 95% Hausdorff distance: the distance between two surfaces, without the worst 5%. Lower is "
    "better.",
)


def _nsd(maps: LabelMaps, index: int) -> float | None:
    """Compute the normalised surface Dice of a class (Nikolov et al. 2021).

    ::

        NSD = (|{s ∈ Sₚ: d(s, Sₜ) ≤ τ}| + |{s ∈ Sₜ: d(s, Sₚ) ≤ τ}|) / (|Sₚ| + |Sₜ|)

    with the distances d between the surfaces S of prediction and truth
    (`surface_distances`). Without a truth it is ``None``, with a truth and no
    prediction 0.

    Deviations:
        Every surface voxel counts alike; Nikolov et al. weigh it by the area of the surface in it.
    """
    _, truth = maps.structure(index)
    if not bool(truth.any()):
        return None
    distances = maps.surface_distances(index)
    return 0.0 if distances is None else float((np.concatenate(distances) <= maps.tolerance).mean())


NSD = Metric(
    "nsd",
    "NSD",
    cases="patients",
    task="segmentation",
    compute=mean_of_classes(_nsd),
    leaves=MEAN,
    position=2,
    zero_is_nothing=True,
    meaning="normalised surface Dice: the share of both surfaces that lie within a tolerance of each other.",
)
