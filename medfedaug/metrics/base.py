"""`Metric`: name, unit, direction and computation of a score, and the form in which a site releases it.

Each `Metric` in a module of this package is built in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from medfedaug.errors import ConfigError
from medfedaug.utils.validation import check_choice, is_number

if TYPE_CHECKING:
    from medfedaug.metrics.label_maps import LabelMaps

    Compute = Callable[[Any], "CaseScores | SiteScores"]

STAYS, MEAN, MEAN_OF_CLASSES = "stays", "mean", "mean of classes"
"""Forms in which a site that sends summaries releases a metric: not at all; its mean over the cases; its mean
over the classes, in which each case counts by the size of its class."""

_PEOPLE = ("Dice", "Jaccard", "Hausdorff")


@dataclass(frozen=True)
class CaseScores:
    """Scores of a metric for one case.

    Args:
        score: the score of the case, if any.
        classes: the score of each class, without the background.
    """

    score: float | None
    classes: Sequence[float | None] = ()


@dataclass(frozen=True)
class SiteScores:
    """Scores of a metric for all cases of a site.

    Args:
        cases: the score of each case by its name, for metrics of cases.
        classes: the score of each class by its name.
        values: by class, the values and patients of which its score is the mean, if it is one.
    """

    score: float | None
    cases: Mapping[str, float | None] | None = None
    classes: Mapping[str, float | None] = field(default_factory=dict)
    values: Mapping[str, Sequence[tuple[float, Hashable]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """A score: its names, computation, direction and release.

    Args:
        name: its name in ``results.json``.
        title: its name for readers.
        higher_is_better: its direction.
        largest: the largest possible score; the smallest is 0.
        has_unit: it is a length, in the site's unit (`medfedaug.metrics.registry.UNITS`).
        cases: unit of the cases, ``"patients"`` or ``"images"``.
        task: the task that computes it; empty for a metric of a Bundle, which computes it itself.
        compute: of a segmentation, `CaseScores` of one case (`medfedaug.metrics.label_maps.LabelMaps`); of
            a classification, `SiteScores` of all cases
            (`medfedaug.metrics.classification.ClassifiedImages`).
        by_class: results have it for each class.
        leaves: the form in which a site that sends summaries releases it (`STAYS`, `MEAN` or
            `MEAN_OF_CLASSES`). A site whose policy releases the scores of cases releases all of them.
        meaning: one sentence for the glossary of a report.
        position: place among the columns of its task; the first one chooses the round.
        skips_missed: a structure that was not predicted has no score, and is counted as missed.
        zero_is_nothing: 0 at every site shows that a model has learned nothing.
        is_recall: its score of a class is the share of the class's images that are classified as it.

    Raises:
        ConfigError: for values that contradict each other.

    Example:
        >>> Metric("gap", "Gap", largest=1e5, leaves=MEAN)
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: metric gap: a mean leaves a site only if scores lie between 0 and 1
    """

    name: str
    title: str
    higher_is_better: bool = True
    largest: float = 1.0
    has_unit: bool = False
    cases: str = "images"
    _: KW_ONLY
    task: str = ""
    compute: Compute | None = None
    by_class: bool = True
    leaves: str = STAYS
    meaning: str = ""
    position: int = 100
    skips_missed: bool = False
    zero_is_nothing: bool = False
    is_recall: bool = False

    def __post_init__(self) -> None:
        check_choice(f"metric {self.name}: leaves", self.leaves, (STAYS, MEAN, MEAN_OF_CLASSES))
        if self.leaves != STAYS and (self.largest > 1 or self.has_unit):
            raise ConfigError(f"metric {self.name}: a mean leaves a site only if scores lie between 0 and 1")

    @property
    def in_text(self) -> str:
        """The title within a sentence, in small letters unless it is a name or an abbreviation.

        Example:
            >>> Metric("auc", "AUC").in_text, Metric("balanced_accuracy", "Balanced accuracy").in_text
            ('AUC', 'balanced accuracy')
        """
        first, *others = self.title.split(" ")
        word = first[1:].islower() and first not in _PEOPLE
        return " ".join([first.lower() if word else first, *others])

    def worst(self, scores: Mapping[str, float]) -> str:
        """Return the name of the worst score, the first by name of equal ones."""
        return (min if self.higher_is_better else max)(sorted(scores), key=lambda name: scores[name])

    def accepts(self, value: Any) -> bool:
        """Return whether a value is a score that the metric can have.

        Example:
            >>> [Metric("dice", "Dice").accepts(value) for value in (0.5, 7, float("nan"), True)]
            [True, False, False, False]
        """
        return is_number(value) and 0 <= value <= self.largest

    def scores(self, cases: Any) -> Any:
        """Compute scores of `compute`'s cases."""
        assert self.compute is not None
        return self.compute(cases)


def mean_of_classes(score: Callable[[LabelMaps, int], float | None]) -> Callable[[LabelMaps], CaseScores]:
    """Compute a metric of a segmentation class by class; the score of a case is their mean."""

    def compute(maps: LabelMaps) -> CaseScores:
        scores = [score(maps, index) for index in range(1, len(maps.classes))]
        return CaseScores(mean_score(scores), scores)

    return compute


def mean_score(scores: Iterable[float | None]) -> float | None:
    """Return the mean of the known scores, if any.

    Example:
        >>> mean_score([0.5, None, 1.0]), mean_score([None])
        (0.75, None)
    """
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else None
