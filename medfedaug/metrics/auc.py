"""AUC: area under the ROC curve of each class against all others, and the mean of the classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medfedaug.metrics.base import MEAN_OF_CLASSES, Metric, SiteScores, mean_score

if TYPE_CHECKING:
    from medfedaug.metrics.classification import ClassifiedImages


def _auc(images: ClassifiedImages) -> SiteScores:
    """Compute MONAI's area; where a site has images of one class alone, no class has one."""
    from monai.metrics import compute_roc_auc

    found: dict[str, float | None] = {}
    for index, name in enumerate(images.classes):
        own = images.targets == index
        both = bool(own.any()) and not bool(own.all())
        ranked = images.probabilities[:, index]
        found[name] = float(compute_roc_auc(ranked, own.int())) if both else None  # type: ignore[arg-type]
    return SiteScores(mean_score(found.values()), classes=found)


METRIC = Metric(
    "auc",
    "AUC",
    task="classification",
    compute=_auc,
    leaves=MEAN_OF_CLASSES,
    position=2,
    meaning="area under the ROC curve: how well the probabilities sort the images. 0.5 is chance.",
)
