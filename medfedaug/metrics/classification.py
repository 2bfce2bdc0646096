"""`ClassifiedImages`: predictions for the images of a site, and the scores that metrics make of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
        names: of the images, (N); by default their numbers.
        owners: the patient of each image, (N); by default each is another patient's.
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
        """True for each image that is given its class, (N)."""
        return self.logits.argmax(dim=1) == self.targets

    @cached_property
    def probabilities(self) -> Tensor:
        """Softmax of the logits, (N, K), float64."""
        # In float32, all probabilities of classes that are 17 ahead would be 1, and equal in rank.
        return self.logits.double().softmax(dim=1)

    @cached_property
    def recalls(self) -> dict[str, float | None]:
        """The share of each class's images that are given it; ``None`` where the site has none of it."""
        found: dict[str, float | None] = {}
        for index, name in enumerate(self.classes):
            own = self.targets == index
            found[name] = float(self.hits[own].double().mean()) if bool(own.any()) else None
        return found

    def hits_of(self, index: int) -> list[tuple[float, Hashable]]:
        """Return 1 or 0 for each image of a class, with its patient."""
        own = self.targets == index
        owners = [owner for owner, mine in zip(self.owners, own.tolist(), strict=True) if mine]
        return list(zip(self.hits[own].double().tolist(), owners, strict=True))


def image_scores(images: ClassifiedImages, metrics: Sequence[str]) -> dict[str, Any]:
    """Score the images of a site.

    Returns:
        See `medfedaug.tasks.base.Task.evaluate`; by class, the ends of the 95% intervals too.
    """
    scores: dict[str, SiteScores] = {name: METRICS[name].scores(images) for name in metrics}
    classes: dict[str, dict[str, Any]] = {name: {} for name in images.classes}
    by_class = {name: found for name, found in scores.items() if METRICS[name].by_class}
    for label, entry in classes.items():
        entry |= {name: found.classes.get(label) for name, found in by_class.items()}
        for name, found in by_class.items():
            entry |= interval_ends(METRICS[name], found.values.get(label, ()))
    first, *others = metrics
    by_case = {name: scores[name].cases for name in others if scores[name].cases is not None}
    return {
        **{name: found.score for name, found in scores.items()},
        "cases": scores[first].cases,
        "classes": classes,
        **({"case_metrics": by_case} if by_case else {}),
    }
