"""`ClassifiedImages`: predictions for the images of a site; their accuracy, AUC and balanced accuracy."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING

from medfedaug.metrics.base import MEAN, MEAN_OF_CLASSES, Metric, SiteScores, mean_score

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ClassifiedImages:
    """Predictions for all images of a site."""

    logits: Tensor  # (N, K)
    targets: Tensor  # (N), the classes
    classes: Sequence[str]  # K names
    names: Sequence[str] = ()  # names of the images, (N); by default their numbers
    owners: Sequence[Hashable] = ()  # the patient of each image, (N); by default different patients

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.names or [*map(str, range(len(self.targets)))])
        object.__setattr__(self, "owners", self.owners or [*range(len(self.targets))])

    @cached_property
    def hits(self) -> Tensor:
        """Correctness of each image's class, boolean, (N)."""
        return self.logits.argmax(dim=1) == self.targets

    @cached_property
    def probabilities(self) -> Tensor:
        """Softmax of the logits, (N, K), float64."""
        # In float32, all probabilities with a lead of 17 in logits would be 1, and equal in rank.
        return self.logits.double().softmax(dim=1)

    @cached_property
    def recalls(self) -> dict[str, float | None]:
        """Recall of each class; ``None`` for a class without images."""
        members = {name: self.targets == index for index, name in enumerate(self.classes)}
        return {
            name: float(self.hits[chosen].double().mean()) if bool(chosen.any()) else None
            for name, chosen in members.items()
        }

    def hits_of(self, index: int) -> list[tuple[float, Hashable]]:
        """Return 1 or 0 for each image of a class, with its patient."""
        members = self.targets == index
        owners = compress(self.owners, members.tolist())
        return list(zip(self.hits[members].double().tolist(), owners, strict=True))


def _accuracy(images: ClassifiedImages) -> SiteScores:
    cases = dict(zip(images.names, images.hits.double().tolist(), strict=True))
    return SiteScores(
        score=mean_score(cases.values()),
        cases=cases,
        classes=images.recalls,
        values={name: images.hits_of(index) for index, name in enumerate(images.classes)},
    )


ACCURACY = Metric(
    "accuracy",
    "Accuracy",
    task="classification",
    compute=_accuracy,
    leaves=MEAN,
    position=0,
    is_recall=True,
    meaning="the share of correctly classified images.",
)


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


AUC = Metric(
    "auc",
    "AUC",
    task="classification",
    compute=_auc,
    leaves=MEAN_OF_CLASSES,
    position=2,
    meaning="area under the ROC curve: how well the probabilities sort the images. 0.5 is chance.",
)


BALANCED_ACCURACY = Metric(
    "balanced_accuracy",
    "Balanced accuracy",
    task="classification",
    compute=lambda images: SiteScores(mean_score(images.recalls.values())),
    by_class=False,  # the accuracies of the classes are its parts
    leaves=MEAN_OF_CLASSES,
    position=1,
    meaning="the mean over the classes of the share of a class's correctly classified images.",
)
