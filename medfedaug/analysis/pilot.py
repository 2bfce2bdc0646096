"""`Pilot`: measured scores of a short training by FedAvg and by each site alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from medfedaug.analysis.gain_record import FEDAVG, SINGLE, score_differences
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.convergence import is_converged
from medfedaug.metrics.significance import patient_means, t_quantile

METHODS = (FEDAVG, SINGLE)
"""Methods of a pilot, in the order of their trainings."""

METRICS = {"segmentation": "dice", "classification": "accuracy"}
"""Metric of a task's gains."""


@dataclass(frozen=True)
class Pilot:
    """Measured scores of FedAvg and of training alone.

    Attributes:
        metric: metric of the scores.
        rounds: rounds of each training.
        rising: FedAvg's validation score still rose in the last rounds.
        scores: scores by methods and site, of the sites that sent both.
        patients: by site, the deviation over test patients of training alone minus FedAvg, and their number;
            without sites that sent scores of fewer than two patients.
    """

    metric: str
    rounds: int
    rising: bool
    scores: Mapping[str, Mapping[str, float]]
    patients: Mapping[str, tuple[float, int]]

    @classmethod
    def of_results(cls, trained: Mapping[str, Mapping[str, Any]]) -> Pilot | None:
        """Build from a job's results, by methods; ``None`` if no site has both scores."""
        if not {*METHODS} <= trained.keys():
            return None
        metric = METRICS[trained[FEDAVG]["config"]["task"]]
        tested = {name: trained[name]["test"]["sites"] for name in METHODS}
        scored = {
            name: {site: entry[metric] for site, entry in sites.items() if entry.get(metric) is not None}
            for name, sites in tested.items()
        }
        both = sorted(scored[FEDAVG].keys() & scored[SINGLE].keys())
        if not both:
            return None
        rounds = trained[FEDAVG]["rounds"]
        validation = [
            mean_score(scores.get(f"val_{metric}") for scores in entry["sites"].values()) for entry in rounds
        ]
        spreads = {site: _spread(tested[FEDAVG][site], tested[SINGLE][site]) for site in both}
        return cls(
            metric=metric,
            rounds=len(rounds),
            rising=not is_converged(validation),
            scores={name: {site: by_site[site] for site in both} for name, by_site in scored.items()},
            patients={site: spread for site, spread in spreads.items() if spread is not None},
        )

    @property
    def sites(self) -> list[str]:
        """The sites that sent both scores."""
        return list(self.scores[FEDAVG])

    def interval(self, site: str = "") -> tuple[float, float] | None:
        """Return the 95% interval over test patients of training alone minus FedAvg.

        Args:
            site: the site; by default the mean over the sites.

        Returns:
            ``None`` if a site sent scores of too few patients.
        """
        sites = [site] if site else self.sites
        if not {*sites} <= self.patients.keys():
            return None
        variance = sum(spread**2 / n for spread, n in map(self.patients.__getitem__, sites)) / len(sites) ** 2
        least = min(self.patients[name][1] for name in sites)
        middle, half = self.difference(site), t_quantile(0.95, least - 1) * math.sqrt(variance)
        return max(middle - half, -1.0), min(middle + half, 1.0)

    def difference(self, site: str = "", level: str = "mean") -> float:
        """Return training alone minus FedAvg, at a site or of the federation."""
        return score_differences(self.scores, SINGLE, FEDAVG, "site" if site else level)[site]

    def to_dict(self) -> dict[str, Any]:
        """Return the pilot as JSON types."""

        def entry(site: str) -> dict[str, Any]:
            low, high = self.interval(site) or (None, None)
            means = {
                name: scores[site] if site else fmean(scores.values()) for name, scores in self.scores.items()
            }
            return {**means, "single_minus_fedavg": self.difference(site), "low95": low, "high95": high}

        return {
            "metric": self.metric,
            "rounds": self.rounds,
            "still_rising": self.rising,
            "mean": entry(""),
            "sites": {
                site: {**entry(site), "patients": self.patients[site][1] if site in self.patients else None}
                for site in self.sites
            },
        }


def _spread(fedavg: Mapping[str, Any], single: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return the deviation over patients of the difference and their number; ``None`` for fewer than two."""
    ours, theirs = single.get("cases"), fedavg.get("cases")
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return None
    owners = fedavg.get("patients") or {}
    pairs = {
        case: (ours[case], theirs[case])
        for case in sorted(ours.keys() & theirs.keys())
        if ours[case] is not None and theirs[case] is not None
    }
    apart = [a - b for a, b in patient_means(pairs, lambda case: owners.get(case, case)).values()]
    return (stdev(apart), len(apart)) if len(apart) > 1 else None
