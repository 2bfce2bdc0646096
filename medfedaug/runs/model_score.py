"""Scores of a run's model as its record has them: `ModelScore`, and by site and class `Annotated`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from medfedaug.data.dataset_json import LABELLED
from medfedaug.metrics.registry import find_metric, nothing_learned_in
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.statistics import ChannelStatistics

LOW_DICE = 0.5  # warn of a test Dice below this: outline and reference overlap by less than half

_DICE = "dice"


@dataclass(frozen=True)
class ModelScore:
    """Score of a model in its run's test, and the reason not to rely on a prediction, if any.

    A score has its extent, such as ``test Dice 0.83 (mean of 3 sites, lowest 0.71)``.
    """

    score: str
    warning: str = ""

    @classmethod
    def of(cls, record: Mapping[str, Any], site: str = "") -> ModelScore:
        """Summarise the test of a run, from its ``results.json``.

        The score of the site counts, if it was tested; otherwise the mean of all sites.
        """
        test = record.get("test") or {}
        metric = next(iter(test.get("mean", {})), "")
        sites, unseen = (
            {name: entry for name, entry in test.get(group, {}).items() if entry.get(metric) is not None}
            for group in ("sites", "unseen")
        )
        entries = unseen if site in unseen or not sites else sites  # unseen sites do not count in the mean
        scores = {name: entry[metric] for name, entry in entries.items()}
        if not scores:
            return cls("no test score", "the run has no test score: nobody measured this model")
        title = find_metric(metric).title
        if site in scores:
            value, extent, counted_entries = scores[site], f"at {site}", [entries[site]]
        else:
            value, counted_entries = fmean(scores.values()), [*entries.values()]
            extent = f"mean of {counted(len(scores), 'site')}, lowest {min(scores.values()):.2f}"
        text = f"test {title} {value:.2f} ({extent})"
        return cls(text, _warning(test, metric, value, counted_entries))


def _warning(test: Mapping[str, Any], metric: str, value: float, entries: Sequence[Mapping[str, Any]]) -> str:
    if reason := nothing_learned_in(test):
        return f"the model learned nothing: {reason}"
    if metric != _DICE:
        return ""
    if value < LOW_DICE:
        return f"in its test the model overlapped the reference with a Dice of only {value:.2f}"
    by_class: dict[str, list[float]] = {}
    for entry in entries:
        for name, scores in entry.get("classes", {}).items():
            if scores.get(metric) is not None:
                by_class.setdefault(name, []).append(scores[metric])
    means = {name: fmean(scores) for name, scores in by_class.items()}
    low = ", ".join(f"{name} Dice {mean:.2f}" for name, mean in means.items() if mean < LOW_DICE)
    return f"in its test the model missed classes: {low}" if low else ""


OWN, BORROWED, UNKNOWN = "own", "borrowed", "unknown"
"""A class at a site: annotated there for training; learned only from other sites; annotated nowhere."""


@dataclass(frozen=True)
class Annotated:
    """Classes that the sites of a run have annotated for training, and their scores.

    ``classes`` are without the background. ``sites`` has annotated classes by site; no entry means all
    classes. ``test`` has the test scores by site, as in ``results.json``.
    """

    classes: tuple[str, ...]
    sites: Mapping[str, Sequence[str]]
    trained: tuple[str, ...]
    test: Mapping[str, Mapping[str, Any]]
    metric: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Annotated:
        """Read a ``results.json``."""
        test = record.get("test") or {}
        return cls(
            tuple(record["config"].get("classes", ())[1:]),
            record.get(LABELLED) or {},
            tuple(record.get("sites", {})),
            {**test.get("unseen", {}), **test.get("sites", {})},
            next(iter(test.get("mean", {})), "dice"),
        )

    def kind(self, site: str, name: str) -> str:
        """Return `OWN`, `BORROWED` or `UNKNOWN`; unseen sites have borrowed all classes.

        Where every site has annotated every class, all are `OWN`, also at unseen sites.
        """
        if not self.sites:
            return OWN
        lenders = self.lenders(name)
        return OWN if site in lenders else BORROWED if lenders else UNKNOWN

    def lenders(self, name: str) -> list[str]:
        """Return the sites that outlined a class for training."""
        return [site for site in self.trained if name in self.sites.get(site, self.classes)]

    def sentence(self, site: str, name: str) -> str:
        """Describe the scores of a class that a site has not outlined; empty for an annotated class."""
        if (kind := self.kind(site, name)) == OWN:
            return ""
        title = find_metric(self.metric).title
        scores = {
            other: score
            for other, entry in self.test.items()
            if (score := entry.get("classes", {}).get(name, {}).get(self.metric)) is not None
        }
        if kind == UNKNOWN:
            known = f"; {title} in test cases {_range(scores)}" if scores else ""
            return f"{name} was outlined at no site: nobody knows how well it is found{known}"
        where = f"at site {site}" if site in self.trained else "at this site"
        if site in scores:
            return f"{name} was never outlined {where} for training: its {title} there is {scores[site]:.2f}"
        if scores:
            return (
                f"{name} was never outlined {where} and is not measured there: {title} at other sites "
                f"{_range(scores)}, which does not hold for this site's scanner"
            )
        return f"{name} was never outlined {where}: no site has a {title} of it"

    def distance(self, site: str, name: str, statistics: Mapping[str, ChannelStatistics]) -> str:
        """Describe how far a site's mean intensities lie from the nearest lender's, where recorded."""
        known = [statistics[lender] for lender in self.lenders(name) if lender in statistics]
        if site not in statistics or not known:
            return ""
        mean = statistics[site].mean
        far = min(float(((mean - pair.mean).abs() / pair.std.clamp_min(1e-12)).max()) for pair in known)
        return (
            f"; its images' mean intensity is {far:.1f} standard deviations from that of the nearest site "
            "that outlined it"
        )

    def sentences(self, site: str) -> dict[str, str]:
        """Return `sentence` of each class that has one."""
        return {name: text for name in self.classes if (text := self.sentence(site, name))}


def _range(scores: Mapping[str, float]) -> str:
    return " to ".join(dict.fromkeys(f"{pick(scores.values()):.2f}" for pick in (min, max)))
