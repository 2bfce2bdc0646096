"""Scores of label maps and of predicted classes: by case, by class, and their means."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from monai.metrics import DiceMetric, compute_roc_auc
from monai.metrics.utils import get_mask_edges
from monai.networks.utils import one_hot
from monai.transforms.utils import distance_transform_edt
from torch import Tensor

from medfedaug.metrics.registry import METRICS, mean_score
from medfedaug.metrics.significance import mean_interval

__all__ = ["LabelMapScores", "class_scores", "surface_scores", "voxel_edges"]

_PERCENTILE = 95


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


def surface_scores(
    predicted: Tensor, truth: Tensor, edges: Sequence[float], tolerance: float
) -> tuple[float | None, float | None]:
    r"""95% Hausdorff distance and normalised surface Dice of one structure.

    With the surface voxels :math:`S` of a structure, those with a face on the outside (as MONAI's metrics
    define them), and :math:`d(s, S') = \min_{s' \in S'} \lVert s - s' \rVert` between their centres,

    .. math::

        \mathrm{HD95} = \max\{P_{95}(d(S_p, S_t)), P_{95}(d(S_t, S_p))\}, \qquad
        \mathrm{NSD} = \frac{|\{s \in S_p: d(s, S_t) \le \tau\}| + |\{s \in S_t: d(s, S_p) \le \tau\}|}
        {|S_p| + |S_t|}

    with P₉₅ the 95th percentile, linear between neighbours (Nikolov et al. 2021 for the NSD).

    Args:
        predicted: (\*spatial), boolean, in two or three dimensions.
        truth: the same.
        edges: the lengths of a voxel's edges.
        tolerance: τ, in the unit of ``edges``.

    Returns:
        HD95, in the unit of ``edges``, and NSD, from 0 to 1. Without a truth there is neither; with a truth
        and no prediction there is no HD95, which would be infinite, and the NSD is 0.

    Deviations:
        Every surface voxel counts alike; Nikolov et al. weigh it by the area of the surface in it. The
        numbers are those of `monai.metrics.compute_hausdorff_distance` and
        `monai.metrics.compute_surface_dice`, which measure every distance twice and search a tree of surface
        voxels: with scattered predictions, as of an untrained network, that takes twenty times as long as the
        distance transform here.
    """
    if not bool(truth.any()):
        return None, None
    if not bool(predicted.any()):
        return None, 0.0
    surfaces = [np.asarray(surface) for surface in get_mask_edges(predicted, truth)]
    apart = []
    for own, other in (surfaces, surfaces[::-1]):
        distances = np.asarray(distance_transform_edt(~other[None], sampling=list(edges)))
        apart.append(distances[0][own])
    hd95 = max(float(np.percentile(distances, _PERCENTILE)) for distances in apart)
    both = np.concatenate(apart)
    return hd95, float((both <= tolerance).mean())


class LabelMapScores:
    """Scores of the label maps of a site, gathered case by case.

    A class that is absent in a case's truth has no score there, whatever was predicted. One that is there and
    was not predicted at all has a Dice and an NSD of 0; its HD95, which is infinite, enters no mean, and it
    is counted as missed. A case's score is the mean over its classes, a site's the mean over its cases. A
    volume of one slice has the surfaces of its plane.

    Args:
        classes: names, the background first.
        tolerance: of the NSD, in millimetres; in pixels for cases without an affine.
        full: whether surfaces and classes are scored, or the cases' Dice alone.
    """

    def __init__(self, classes: Sequence[str], tolerance: float, *, full: bool) -> None:
        self.classes, self.tolerance, self.full = tuple(classes), tolerance, full
        self.dice: dict[str, float | None] = {}
        self.by_class: dict[str, dict[str, list[float | None]]] = {
            name: {"dice": [], "hd95": [], "nsd": []} for name in self.classes[1:]
        }
        self.by_case: dict[str, dict[str, float | None]] = {"hd95": {}, "nsd": {}}
        self.units: set[str] = set()
        self.owners: list[Hashable] = []

    def add(
        self, case: str, predicted: Tensor, label: Tensor, affine: Tensor | None, owner: Hashable = None
    ) -> None:
        r"""Score a case.

        Args:
            case: its name.
            predicted: label map, (1, \*spatial).
            label: the truth, the same.
            affine: (4, 4), from voxels to millimetres.
            owner: whose it is; by default that of no other case.
        """
        self.owners.append(owner or case)
        metric = DiceMetric(include_background=False, reduction="mean")
        count = len(self.classes)
        metric(y_pred=one_hot(predicted[None], count), y=one_hot(label[None].to(predicted.device), count))
        # MONAI reports 0 when nothing could be scored; the truth tells the two apart.
        self.dice[case] = float(metric.aggregate()) if bool(label.any()) else None  # type: ignore[arg-type]
        if not self.full:
            return
        self.units.add("px" if affine is None else "mm")
        shares = metric.aggregate(reduction="none")[0].tolist()
        kept = _axes(label.shape[1:])
        edges = voxel_edges(affine, label.ndim - 1)
        here, there = (
            value[0].cpu().reshape([label.shape[1 + axis] for axis in kept]) for value in (predicted, label)
        )
        found: dict[str, list[float | None]] = {"hd95": [], "nsd": []}
        for index, (name, dice) in enumerate(zip(self.classes[1:], shares, strict=True), start=1):
            scores = surface_scores(
                here == index, there == index, [edges[axis] for axis in kept], self.tolerance
            )
            self.by_class[name]["dice"].append(None if math.isnan(dice) else dice)
            for metric_name, score in zip(found, scores, strict=True):
                found[metric_name].append(score)
                self.by_class[name][metric_name].append(score)
        for metric_name, values in found.items():
            self.by_case[metric_name][case] = mean_score(values)

    def result(self) -> dict[str, Any]:
        """The scores, as `medfedaug.tasks.base.Task.evaluate` returns them."""
        scored: dict[str, Any] = {"dice": mean_score(self.dice.values()), "cases": self.dice}
        if not self.full:
            return scored
        mixed = len(self.units) > 1  # millimetres and pixels have no mean
        classes: dict[str, dict[str, Any]] = {
            name: {
                **{metric: mean_score(values) for metric, values in scores.items()},
                "missed": _missed(scores),
                **_intervals(scores, self.owners),
            }
            for name, scores in self.by_class.items()
        }
        if mixed:
            for scores in classes.values():
                scores.update(dict.fromkeys(scores.keys() & {"hd95", "hd95_low", "hd95_high"}))
        return {
            "dice": scored["dice"],
            "hd95": None if mixed else mean_score(self.by_case["hd95"].values()),
            "nsd": mean_score(self.by_case["nsd"].values()),
            "missed": sum(_missed(scores) for scores in self.by_class.values()),
            "unit": "mixed" if mixed else next(iter(self.units), None),
            "classes": classes,
            "cases": scored["cases"],
            "case_metrics": self.by_case,
        }


def _intervals(scores: Mapping[str, Sequence[float | None]], owners: Sequence[Hashable]) -> dict[str, Any]:
    """The ends of the 95% intervals of means over cases, where cases of two patients or more have a score."""
    found: dict[str, Any] = {}
    for name, values in scores.items():
        known = [(score, owner) for score, owner in zip(values, owners, strict=True) if score is not None]
        scored, patients = [score for score, _ in known], [owner for _, owner in known]
        if ends := mean_interval(scored, METRICS[name].largest, patients=patients):
            found |= {f"{name}_low": ends[0], f"{name}_high": ends[1]}
    return found


def _missed(scores: Mapping[str, Sequence[float | None]]) -> int:
    return sum(
        nsd is not None and hd95 is None for nsd, hd95 in zip(scores["nsd"], scores["hd95"], strict=True)
    )


def _axes(shape: Sequence[int]) -> list[int]:
    """The axes that surfaces have: without those of length 1, of which two axes at least remain."""
    kept = list(range(len(shape)))
    for axis in reversed(kept.copy()):
        if shape[axis] == 1 and len(kept) > 2:
            kept.remove(axis)
    return kept


def class_scores(
    logits: Tensor, targets: Tensor, classes: Sequence[str], owners: Sequence[Hashable] | None = None
) -> dict[str, Any]:
    """Balanced accuracy and area under the ROC curve, by class and their means.

    A class's accuracy is the share of its images that are taken for it, and its AUC that of the class against
    all others (`monai.metrics.compute_roc_auc`). A class that the site has no image of has neither, and where
    a site has images of one class alone, no class has an AUC. Balanced accuracy and AUC are means over the
    classes that have one, each counting alike.

    Args:
        logits: (N, K); the AUC ranks their softmax.
        targets: (N), the classes.
        classes: K names.
        owners: whose each image is, (N); by default each is another patient's.
    """
    owners = range(len(targets)) if owners is None else owners
    # In float32, all probabilities of classes that are 17 ahead would be 1, and equal in rank.
    hits, probabilities = logits.argmax(dim=1) == targets, logits.double().softmax(dim=1)
    found: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(classes):
        own = targets == index
        both = bool(own.any()) and not bool(own.all())
        found[name] = {
            "accuracy": float(hits[own].double().mean()) if bool(own.any()) else None,
            "auc": float(compute_roc_auc(probabilities[:, index], own.int())) if both else None,  # type: ignore[arg-type]
            **_intervals(
                {"accuracy": hits[own].double().tolist()},
                [o for o, mine in zip(owners, own.tolist(), strict=True) if mine],
            ),
        }
    return {
        "balanced_accuracy": mean_score(scores["accuracy"] for scores in found.values()),
        "auc": mean_score(scores["auc"] for scores in found.values()),
        "classes": found,
    }
