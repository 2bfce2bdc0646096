"""`make_prospect`: the gain that sites can expect of training together, from their fingerprints alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from medfedaug.analysis.calibration_table import FEDAVG, SINGLE, Calibration, features
from medfedaug.analysis.fingerprint_distance import appearance, check_together, distances
from medfedaug.analysis.gain_prediction import LEVELS, Expected, GainModel, at_level, tested_patients
from medfedaug.analysis.prediction_judge import Judgement, judge_table
from medfedaug.data.quality.image_fingerprint import ImageFingerprint
from medfedaug.errors import ConfigError
from medfedaug.metrics.significance import detectable_difference

__all__ = ["NOT_A_REMEDY", "Prospect", "make_prospect"]

NOT_A_REMEDY = (SINGLE, "pooled")
"""Methods of the table that are no way of training together without sharing images."""

_METRICS = {"segmentation": "dice", "classification": "accuracy"}
_MOST_PATIENTS = 2000
_BEYOND_CHANCE = 2.0  # times; the farthest of several sites is judged
_DRAWS = 30  # of the noise of fingerprints, for the deviation that it gives to predictions
_NOTICEABLE = {
    "polarity": 1.5,
    "size": 1.0,
    "pieces": 1.0,
    "prevalence": 0.3,
    "resolution": 0.5,
    "noise": 1.0,
}


@dataclass(frozen=True)
class Prospect:
    """Expected gains of a federation that has not trained.

    Attributes:
        sites: the fingerprints.
        distances: by site and kind (`medfedaug.analysis.fingerprint_distance.KINDS`).
        gains: by level and methods, of each site or of the federation under the empty name: the gain over
            FedAvg.
        over_single: the same over each site training for itself; of ``fedavg`` too.
        judged: by level and methods, of the gain over FedAvg; and of ``fedavg`` over training alone.
        table: behind it; its federations have the task of the sites.
        missing: sites that did not take part, with the reason.
    """

    sites: tuple[ImageFingerprint, ...]
    distances: Mapping[str, Mapping[str, float]]
    gains: Mapping[str, Mapping[str, Mapping[str, Expected]]]
    over_single: Mapping[str, Mapping[str, Mapping[str, Expected]]]
    judged: Mapping[tuple[str, str], Judgement]
    table: Calibration = field(repr=False)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_predicted(self) -> bool:
        """Return whether the table has federations from which some gain is predicted."""
        return bool(self.gains["mean"] or self.over_single["mean"])

    @property
    def together(self) -> Expected | None:
        """The gain of FedAvg over training alone, in the mean of the sites."""
        return self.over_single["mean"].get(FEDAVG, {}).get("")

    @property
    def remedy(self) -> str:
        """The method with the largest gain that is predicted with skill and has an 80% interval above 0.

        FedAvg where there is none.
        """
        surely = {
            methods: found[""].mean
            for methods, found in self.gains["mean"].items()
            if methods not in NOT_A_REMEDY
            and self.has_skill(methods)
            and found[""].interval80 is not None
            and found[""].interval80[0] > 0
        }
        return max(surely, key=lambda methods: surely[methods], default=FEDAVG)

    @property
    def is_unlike(self) -> bool:
        """Return whether nothing in the table is like the sites, by gains of which something is shown."""
        gains = self.gains["mean"]
        shown = [methods for methods in gains if self.is_shown(methods)] or list(gains)
        return any(gains[methods][""].is_unlike for methods in shown)

    def holds(self, methods: str, level: str = "mean") -> bool:
        """Return whether it is shown that the intervals of a gain hold."""
        judged = self.judged.get((methods, level))
        return judged is not None and judged.holds

    def has_skill(self, methods: str, level: str = "mean") -> bool:
        """Return whether predictions of a gain erred less than always saying 0."""
        judged = self.judged.get((methods, level))
        return judged is not None and judged.has_skill

    def is_shown(self, methods: str, level: str = "mean") -> bool:
        """Return whether anything is shown of a gain: that its intervals hold, or that there is skill."""
        return self.holds(methods, level) or self.has_skill(methods, level)

    def patients_needed(self, methods: str) -> int | None:
        """Return the number of test patients that would show the gain of a method over FedAvg.

        ``None`` where it would be more than 2000, or no deviation between patients is known.
        """
        spread, found = self.table.patient_deviation(methods), self.gains["mean"].get(methods)
        if not spread or not found:
            return None
        gain = abs(found[""].mean)
        low, high = 2, _MOST_PATIENTS
        if detectable_difference(spread, high) > gain:
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if detectable_difference(spread, middle) <= gain else (middle + 1, high)
        return low

    def detectable(self, patients: int) -> float | None:
        """Return the smallest difference between two methods that so many test patients would show."""
        spreads = [self.table.patient_deviation(methods) for methods in self.gains["mean"]]
        known = [spread for spread in spreads if spread]
        return detectable_difference(max(known), patients) if known and patients > 1 else None

    def reasons(self, site: str | None = None) -> list[str]:
        """Name what differs noticeably between the sites, or at one site, each with what follows from it."""
        kinds = [self.distances[site]] if site else list(self.distances.values())
        worst = {kind: max(one[kind] for one in kinds) for kind in kinds[0]}
        found = []
        names = [site] if site else list(self.distances)
        apart, farthest = max((appearance(self.distances[name]), name) for name in names)
        if worst["polarity"] >= _NOTICEABLE["polarity"]:
            found.append(
                f"images of a site lie {worst['polarity']:.1f} deviations from 0 under another's statistics, "
                "as where one stores dark what the other stores bright: agree on the polarity first"
            )
        elif apart >= max(1.0, _BEYOND_CHANCE * self._by_chance(farthest)):
            found.append(
                f"intensities differ by {apart:.1f} deviations of the images within a site: harmonise them "
                "(norm, FedRDN) or train against it (FedFA)"
            )
        if worst["resolution"] >= _NOTICEABLE["resolution"]:
            found.append(
                f"voxels differ by a factor of {2 ** worst['resolution']:.1f}: bring them to one spacing "
                "(medfedaug plan)"
            )
        if worst["noise"] >= _NOTICEABLE["noise"]:
            found.append(f"noise differs by a factor of {2 ** worst['noise']:.1f}: augment with noise")
        if worst["size"] >= _NOTICEABLE["size"]:
            found.append(
                f"volumes of a class differ by a factor of {2 ** worst['size']:.1f}: compare outlines on "
                "a few cases and agree on them, or let each site keep layers of its own (FedBN, Ditto)"
            )
        if worst["pieces"] >= _NOTICEABLE["pieces"]:
            found.append(f"numbers of pieces differ by a factor of {2 ** worst['pieces']:.1f}")
        if worst["prevalence"] >= _NOTICEABLE["prevalence"]:
            found.append(f"the share of cases with a class differs by {worst['prevalence']:.0%}")
        return found

    def _by_chance(self, site: str) -> float:
        """Distance in appearance that a site has from the others where the sites do not differ."""
        cases = {one.site: max(one.looked_at, 1) for one in self.sites}
        own = cases.pop(site)
        return fmean(math.sqrt(1 / own + 1 / other) for other in cases.values())

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types: ``prospect.json``."""
        together = self.together
        return {
            "sites": {site.site: self._site(site) for site in self.sites},
            "expected": self._expected("mean"),
            "worst": self._expected("worst"),
            "together": None if together is None else together.to_dict(),
            "remedy": self.remedy,
            "reasons": self.reasons(),
            "patients_needed": self.patients_needed(self.remedy) if self.remedy != FEDAVG else None,
            "unlike_anything_measured": self.is_unlike,
            "missing": dict(self.missing),
            "calibration": {
                "federations": self.table.number,
                "families": self.table.families,
                "seeds": self.table.seeds,
                "judged": [
                    {**vars(one), "holds": one.holds, "has_skill": one.has_skill}
                    for one in self.judged.values()
                ],
            },
        }

    def _expected(self, level: str, name: str = "") -> dict[str, Any]:
        found = {}
        for methods, gains in self.gains[level].items():
            over = self.over_single[level].get(methods, {})
            found[methods] = {
                **gains[name].to_dict(),
                "over_single": over[name].to_dict() if name in over else None,
                "patients_needed": self.patients_needed(methods),
                "shown_to_hold": self.holds(methods, level),
                "shown_to_have_skill": self.has_skill(methods, level),
            }
        return found

    def _site(self, site: ImageFingerprint) -> dict[str, Any]:
        kinds = self.distances[site.site]
        alone = self.over_single["site"].get(FEDAVG, {}).get(site.site)
        return {
            "distance": appearance(kinds),
            "distances": dict(kinds),
            "cases": site.cases,
            "looked_at": site.looked_at,
            "patients": site.patients,
            "test_patients": site.test_patients,
            "noise": site.noise,
            **({"scanners": dict(site.scanners)} if site.scanners else {}),
            "expected": self._expected("site", site.site),
            "together": None if alone is None else alone.to_dict(),
            "detectable": self.detectable(site.test_patients),
        }


def _with_more_noise(sites: Sequence[ImageFingerprint]) -> list[dict[str, list[float]]]:
    """Features of the sites with the noise of their fingerprints drawn again, several times.

    This noise hides nobody, and its seed is fixed: the same fingerprints give the same page.
    """
    R = np.random.RandomState(0)

    def drawn(site: ImageFingerprint) -> ImageFingerprint:
        entries = {
            name: (value + site.noise * torch.from_numpy(R.normal(size=tuple(value.shape)))).clamp(0, 1)
            for name, value in site.entries.items()
        }
        return replace(site, entries=entries)

    return [features([drawn(site) if site.noise else site for site in sites]) for _ in range(_DRAWS)]


def make_prospect(
    sites: Sequence[ImageFingerprint], table: Calibration, missing: Mapping[str, str] | None = None
) -> Prospect:
    """Predict gains from fingerprints; none where the table has no federations with the task of the sites.

    Args:
        sites: of the sites that would train together.
        table: the calibration.
        missing: sites that did not take part, with the reason.

    Raises:
        ConfigError: when the sites cannot be compared, or the table has too few federations.
    """
    check_together(sites)
    if table.number < 2:
        raise ConfigError(
            f"the calibration table has {table.number} federations, and two are needed: "
            "give more with --calibration FILE"
        )
    table = table.scored_by(_METRICS[sites[0].task])
    found = features(sites)
    noisy = _with_more_noise(sites) if any(site.noise for site in sites) else []

    def expect(methods: str, over: str, level: str) -> dict[str, Expected]:
        try:
            model = GainModel(table, methods, over, level)
        except ValueError:
            return {}
        tested = tested_patients(sites, level)
        expected = {name: model.predict(x, tested[name]) for name, x in at_level(found, level).items()}
        if not noisy:
            return expected
        others = [at_level(one, level) for one in noisy]
        return {
            name: one.widened(pstdev(model.mean_at(other[name]) for other in others))
            for name, one in expected.items()
        }

    def all_of(over: str, methods: Sequence[str]) -> dict[str, dict[str, dict[str, Expected]]]:
        return {
            level: {name: gains for name in methods if (gains := expect(name, over, level))}
            for level in LEVELS
        }

    return Prospect(
        sites=tuple(sites),
        distances=distances(sites),
        gains=all_of(FEDAVG, table.methods),
        over_single=all_of(SINGLE, [FEDAVG, *(m for m in table.methods if m != SINGLE)]),
        judged={(one.methods, one.level): one for one in judge_table(table)},
        table=table,
        missing=dict(missing or {}),
    )
