"""Balanced accuracy: mean of the classes' recalls, each counting alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medfedaug.metrics.base import MEAN_OF_CLASSES, Metric, SiteScores, mean_score

if TYPE_CHECKING:
    from medfedaug.metrics.classification import ClassifiedImages


def _balanced_accuracy(images: ClassifiedImages) -> SiteScores:
    return SiteScores(mean_score(images.recalls.values()))


METRIC = Metric(
    "balanced_accuracy",
    "Balanced accuracy",
    task="classification",
    compute=_balanced_accuracy,
    by_class=False,  # its parts are the accuracies of the classes
    leaves=MEAN_OF_CLASSES,
    position=1,
    meaning="the mean over the classes of the share of a class's images that are given it.",
)
