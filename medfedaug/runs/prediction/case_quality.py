"""Quality of a predicted case without a reference, and the order in which to look at cases.

`benchmarks/look_first.py` measures how many of the worst predictions the order finds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import ndimage
from torch import Tensor

from medfedaug.runs.prediction.pass_agreement import PassAgreement


def case_quality(
    label: Tensor, confidence: Tensor, classes: Sequence[str], passes: PassAgreement | None = None
) -> dict[str, dict[str, Any]]:
    """Describe a label map by class: number of pieces, confidence, agreement of several passes.

    The label map is (1, X, Y, Z), and the confidence (K - 1,), of
    `medfedaug.functional.soft_dice_confidence.soft_dice_confidence`. The classes begin with the background.

    Returns:
        ``components``; ``confidence`` of the predicted classes; with several passes ``agreement`` of the
        classes that any pass predicts.
    """
    quality: dict[str, dict[str, Any]] = {
        "components": count_components(label, classes),
        "confidence": _by_class(classes, confidence),
    }
    return quality if passes is None else {**quality, "agreement": _by_class(classes, passes.agreement())}


def count_components(label: Tensor, classes: Sequence[str]) -> dict[str, int]:
    """Count the connected pieces of each class but the background (`connected_pieces`)."""
    voxels = label[0].numpy()
    boxes = ndimage.find_objects(voxels, max_label=len(classes) - 1)
    return {
        name: 0 if box is None else connected_pieces(voxels[box] == number)
        for number, (name, box) in enumerate(zip(classes[1:], boxes, strict=True), start=1)
    }


def _by_class(classes: Sequence[str], values: Tensor) -> dict[str, float]:
    named = zip(classes[1:], values.tolist(), strict=True)
    return {name: value for name, value in named if not math.isnan(value)}


def look_first(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sort cases by their least certain class; empty label maps come first.

    The certainty of a class is the agreement of several passes, else its confidence.
    """
    lowest: dict[str, float] = {}
    for name, entry in cases.items():
        if "probabilities" in entry:
            lowest[name] = entry["probabilities"][entry["class"]]
        else:
            # Predicted classes alone: a pass may have a voxel of another class, without agreement.
            confidence, agreement = entry["confidence"], entry.get("agreement", {})
            certainty = (agreement.get(label, value) for label, value in confidence.items())
            lowest[name] = min(certainty, default=0.0)
    return sorted(lowest, key=lambda name: (lowest[name], name))


def connected_pieces(mask: np.ndarray) -> int:
    """Count the pieces of a boolean mask, whose voxels touch by a face, an edge or a corner.

    Example:
        >>> connected_pieces(np.eye(3, dtype=bool))
        1
    """
    return int(ndimage.label(mask, np.ones((3,) * mask.ndim))[1])
