"""Quality of a predicted case without a reference, and the order in which to look at cases.

`benchmarks/look_first.py` measures how many of the worst predictions the order finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import ndimage
from torch import Tensor

__all__ = ["case_quality", "look_first"]


def case_quality(label: Tensor, confidence: Tensor, classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Describe a label map: by class the number of its pieces, and its confidence where it is found.

    Args:
        label: (1, X, Y, Z); pieces touch by a face, an edge or a corner.
        confidence: (K - 1,), of `medfedaug.functional.soft_dice_confidence.soft_dice_confidence`.
        classes: names of the classes, background first.
    """
    voxels = label[0].numpy()
    boxes = ndimage.find_objects(voxels, max_label=len(classes) - 1)
    touching = np.ones((3,) * voxels.ndim)
    components = {
        name: 0 if box is None else int(ndimage.label(voxels[box] == number, touching)[1])
        for number, (name, box) in enumerate(zip(classes[1:], boxes, strict=True), start=1)
    }
    known = dict(zip(classes[1:], confidence.tolist(), strict=True))
    return {
        "components": components,
        "confidence": {name: value for name, value in known.items() if not math.isnan(value)},
    }


def look_first(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sort cases by their lowest confidence; one in which nothing is found comes first.

    Args:
        cases: of ``predictions.json``: label maps with ``confidence`` by class, or classes with
            ``probabilities``. Those of earlier releases, without a confidence, are left out.
    """
    lowest: dict[str, float] = {}
    for name, entry in cases.items():
        if "probabilities" in entry:
            lowest[name] = entry["probabilities"][entry["class"]]
        elif "confidence" in entry:
            lowest[name] = min(entry["confidence"].values(), default=0.0)
    return sorted(lowest, key=lambda name: (lowest[name], name))
