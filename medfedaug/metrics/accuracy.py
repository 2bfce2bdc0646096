"""Accuracy: share of correctly classified images; of a class, its recall."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medfedaug.metrics.base import MEAN, Metric, SiteScores, mean_score

if TYPE_CHECKING:
    from medfedaug.metrics.classification import ClassifiedImages


def _accuracy(images: ClassifiedImages) -> SiteScores:
    cases = dict(zip(images.names, images.hits.double().tolist(), strict=True))
    return SiteScores(
        score=mean_score(cases.values()),
        cases=cases,
        classes=images.recalls,
        values={name: images.hits_of(index) for index, name in enumerate(images.classes)},
    )


METRIC = Metric(
    "accuracy",
    "Accuracy",
    task="classification",
    compute=_accuracy,
    leaves=MEAN,
    position=0,
    is_recall=True,
    meaning="the share of correctly classified images.",
)
