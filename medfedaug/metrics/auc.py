"""AUC: area under the ROC curve of each class against all others, and the mean of the classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medfedaug.metrics.base import MEAN_OF_CLASSES, Metric, SiteScores, mean_score

if TYPE_CHECKING:
    from medfedaug.metrics.classification import ClassifiedImages


def _auc(images: ClassifiedImages) -> SiteScores:
    """Compute MONAI's area; a class without images, or the only one with images, has none."""
    from monai.metrics import compute_roc_auc

    areas: dict[str, float | None] = {}
    for index, name in enumerate(images.classes):
        members = images.targets == index
        both = bool(members.any()) and not bool(members.all())
        ranked = images.probabilities[:, index]
        areas[name] = float(compute_roc_auc(ranked, members.int())) if both else None  # type: ignore[arg-type]
    return SiteScores(mean_score(areas.values()), classes=areas)


METRIC = Metric(
    "auc",
    "AUC",
    task="classification",
    compute=_auc,
    leaves=MEAN_OF_CLASSES,
    position=2,
    meaning="area under the ROC curve: how well the probabilities sort the images. 0.5 is chance.",
)
