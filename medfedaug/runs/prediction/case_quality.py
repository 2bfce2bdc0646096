"""Sizes and certainty of the predicted classes of a case, and the order in which to look at cases."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def certainty(confidence: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """Return the confidence of the predicted classes of a label map.

    The confidence, (K - 1,), is of `medfedaug.functional.soft_dice_confidence.soft_dice_confidence`. The
    classes begin with the background.
    """
    named = zip(classes[1:], confidence.tolist(), strict=True)
    return {name: value for name, value in named if not math.isnan(value)}


def look_first(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sort cases by their least certain class; empty label maps come first.

    ``docs/results/look_first`` measures how many of the worst predictions the order finds.
    """
    lowest = {
        name: entry["probabilities"][entry["class"]]
        if "probabilities" in entry
        else min(entry["confidence"].values(), default=0.0)
        for name, entry in cases.items()
    }
    return sorted(lowest, key=lambda name: (lowest[name], name))


def foreground_voxels(label: Tensor, classes: Sequence[str]) -> dict[str, int]:
    """Count the voxels of each class but the background."""
    counts = torch.bincount(label.flatten().int(), minlength=len(classes)).tolist()
    return dict(zip(classes[1:], counts[1:], strict=True))


def volumes_in_millilitres(voxels: Mapping[str, int], affine: Tensor | None) -> dict[str, float] | None:
    """Return the volumes of numbers of voxels; ``None`` without an affine."""
    if affine is None:
        return None
    voxel = abs(float(torch.linalg.det(affine[:3, :3].double()))) / 1000
    return {name: count * voxel for name, count in voxels.items()}
