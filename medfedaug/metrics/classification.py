"""`ClassifiedImages`: predictions for the images of a site; `image_scores`: their scores."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

from medfedaug.metrics.base import SiteScores
from medfedaug.metrics.registry import METRICS
from medfedaug.metrics.significance import interval_ends

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ClassifiedImages:
    """Predictions for all images of a site.

    Args:
        logits: (N, K).
        targets: (N), the classes.
        classes: K names.
        names: names of the images, (N); by default their numbers.
        owners: the patient of each image, (N); by default different patients.
    """

    logits: Tensor
    targets: Tensor
    classes: Sequence[str]
    names: Sequence[str] = ()
    owners: Sequence[Hashable] = ()

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


def image_scores(images: ClassifiedImages, metrics: Sequence[str]) -> dict[str, Any]:
    """Score the images of a site.

    Returns:
        The scores as `medfedaug.tasks.base.Task.evaluate`; by class also the ends of the 95% intervals.
    """
    scores: dict[str, SiteScores] = {name: METRICS[name].scores(images) for name in metrics}
    classes: dict[str, dict[str, Any]] = {name: {} for name in images.classes}
    by_class = {name: site_scores for name, site_scores in scores.items() if METRICS[name].by_class}
    for label, entry in classes.items():
        entry |= {name: site_scores.classes.get(label) for name, site_scores in by_class.items()}
        for name, site_scores in by_class.items():
            entry |= interval_ends(METRICS[name], site_scores.values.get(label, ()))
    first, *others = metrics
    by_case = {name: scores[name].cases for name in others if scores[name].cases is not None}
    return {
        **{name: site_scores.score for name, site_scores in scores.items()},
        "cases": scores[first].cases,
        "classes": classes,
        **({"case_metrics": by_case} if by_case else {}),
    }
