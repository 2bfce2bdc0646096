"""Dice: overlap of two regions, without the background."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from medfedaug.metrics.base import MEAN, CaseScores, Metric

if TYPE_CHECKING:
    from medfedaug.metrics.label_maps import LabelMaps


def _dice(maps: LabelMaps) -> CaseScores:
    """Compute MONAI's Dice; a class that is absent in the truth has none."""
    from monai.metrics import DiceMetric
    from monai.networks.utils import one_hot

    metric, count = DiceMetric(include_background=False, reduction="mean"), len(maps.classes)
    predicted, truth = maps.predicted[None], maps.truth[None].to(maps.predicted.device)
    metric(y_pred=one_hot(predicted, count), y=one_hot(truth, count))
    shares = metric.aggregate(reduction="none")[0].tolist()
    # MONAI also reports 0 without any score; the truth distinguishes the two.
    score = float(metric.aggregate()) if bool(maps.truth.any()) else None  # type: ignore[arg-type]
    return CaseScores(score, [None if math.isnan(share) else share for share in shares])


METRIC = Metric(
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
