"""Balanced accuracy: mean of the classes' recalls, each counting alike."""

from medfedaug.metrics.base import MEAN_OF_CLASSES, Metric, SiteScores, mean_score

METRIC = Metric(
    "balanced_accuracy",
    "Balanced accuracy",
    task="classification",
    compute=lambda images: SiteScores(mean_score(images.recalls.values())),
    by_class=False,  # the accuracies of the classes are its parts
    leaves=MEAN_OF_CLASSES,
    position=1,
    meaning="the mean over the classes of the share of a class's correctly classified images.",
)
