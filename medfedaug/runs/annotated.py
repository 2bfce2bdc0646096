"""Own, borrowed and unknown classes of the sites of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from medfedaug.data.dataset_json import LABELLED
from medfedaug.metrics.registry import find_metric

if TYPE_CHECKING:
    from medfedaug.statistics import ChannelStatistics

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
