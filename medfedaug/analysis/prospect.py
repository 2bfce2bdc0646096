"""`make_prospect` compares sites, and predicts gains from a pilot."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from medfedaug.analysis.fingerprint_distance import appearance, check_together, distances
from medfedaug.analysis.gain_record import FEDAVG, LEVELS, SINGLE, Claim, Expected, GainRecord, find_record
from medfedaug.analysis.pilot import METRICS, Pilot
from medfedaug.data.quality.image_fingerprint import ImageFingerprint
from medfedaug.metrics.significance import detectable_difference

NOT_A_REMEDY = (SINGLE, "pooled")
"""Methods of the record that do not train together without sharing images."""

_MOST_PATIENTS = 2000
_BEYOND_CHANCE = 2.0  # times; the farthest of several sites is judged
_POLARITY = 1.5
_NOTICEABLE = {
    "resolution": (
        0.5,
        "voxels differ by a factor of {factor:.1f}: bring them to one spacing (medfedaug plan)",
    ),
    "noise": (1.0, "noise differs by a factor of {factor:.1f}"),
    "size": (1.0, "volumes of a class differ by a factor of {factor:.1f}: compare outlines on a few cases"),
    "pieces": (1.0, "numbers of pieces differ by a factor of {factor:.1f}"),
    "prevalence": (0.3, "the share of cases with a class differs by {distance:.0%}"),
}
"""Distances from which a kind is a reason, each with its sentence."""


@dataclass(frozen=True)
class Prospect:
    """Measurements of a federation before it trains, and expected gains after a pilot.

    Attributes:
        distances: by site and kind (`medfedaug.analysis.fingerprint_distance.KINDS`).
        record: the recorded federations with the task and the norm of the sites' networks.
        norm: norm of the networks.
        pilot: the measured pilot.
        gains: expected gains with a known interval, by level and methods, of each site or of the federation
            under the empty name.
        missing: sites that did not take part, with the reason.
    """

    sites: tuple[ImageFingerprint, ...]
    distances: Mapping[str, Mapping[str, float]]
    record: GainRecord = field(repr=False)
    norm: str
    pilot: Pilot | None = None
    gains: Mapping[str, Mapping[str, Mapping[str, Expected]]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def yardsticks(self) -> dict[str, Expected]:
        """Range of recorded gains in the mean of the sites, by methods: 0 plus and minus a quantile."""
        return {name: Expected.around(0.0, halves) for name, halves in self.record.yardsticks.items()}

    @property
    def claims(self) -> Sequence[Claim]:
        """The judged predictions after a pilot; none without one."""
        return () if self.pilot is None else self.record.claims

    def expected(self, methods: str, level: str = "mean", site: str = "") -> Expected | None:
        """Return an expected gain, if it is known."""
        return self.gains.get(level, {}).get(methods, {}).get(site)

    @property
    def remedy(self) -> str:
        """The method with the largest expected gain whose 80% interval lies above 0; FedAvg without one."""
        gains = {
            methods: by_site[""].mean
            for methods, by_site in self.gains.get("mean", {}).items()
            if methods not in (FEDAVG, *NOT_A_REMEDY)
            and by_site[""].interval80 is not None
            and by_site[""].interval80[0] > 0
        }
        return max(gains, key=gains.__getitem__, default=FEDAVG)

    def patients_needed(self, methods: str) -> int | None:
        """Return the number of test patients that would show the expected gain of a method over FedAvg.

        ``None`` for more than 2000, and if the gain or its deviation between patients is not known.
        """
        spread, expected = self.record.deviations.get(methods), self.expected(methods)
        if (
            not spread
            or expected is None
            or detectable_difference(spread, _MOST_PATIENTS) > abs(expected.mean)
        ):
            return None
        numbers = range(2, _MOST_PATIENTS)
        return 2 + bisect_left(
            numbers, -abs(expected.mean), key=lambda number: -detectable_difference(spread, number)
        )

    def detectable(self, patients: int) -> float | None:
        """Return the smallest difference between two methods that a number of test patients would show."""
        spread = max(self.record.deviations.values(), default=0.0)
        return detectable_difference(spread, patients) if spread and patients > 1 else None

    def reasons(self, site: str | None = None) -> list[str]:
        """Return sentences on noticeable differences between the sites, or at one site."""
        names = [site] if site else list(self.distances)
        kinds = [self.distances[name] for name in names]
        worst = {kind: max(distances[kind] for distances in kinds) for kind in kinds[0]}
        reasons = []
        apart, farthest = max((appearance(self.distances[name]), name) for name in names)
        if worst["polarity"] >= _POLARITY:
            reasons.append(
                f"images of a site lie {worst['polarity']:.1f} deviations from 0 under another's statistics; "
                "one site may store bright what another stores dark: look at images of both"
            )
        elif apart >= max(1.0, _BEYOND_CHANCE * self._by_chance(farthest)):
            reasons.append(f"intensities differ by {apart:.1f} deviations of the images within a site")
        for kind, (least, sentence) in _NOTICEABLE.items():
            if (distance := worst[kind]) >= least:
                reasons.append(sentence.format(factor=2**distance, distance=distance))
        return reasons

    def _by_chance(self, site: str) -> float:
        """Return the distance in appearance of a site from others that do not differ."""
        cases = {one.site: max(one.looked_at, 1) for one in self.sites}
        number = cases.pop(site)
        return fmean(math.sqrt(1 / number + 1 / other) for other in cases.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``prospect.json`` as JSON types."""
        together = self.expected(FEDAVG)
        return {
            "sites": {site.site: self._site(site) for site in self.sites},
            "expected": self._all_expected("mean"),
            "worst": self._all_expected("worst"),
            "together": together and _numbers(together),
            "pilot": None if self.pilot is None else self.pilot.to_dict(),
            "remedy": self.remedy,
            "reasons": self.reasons(),
            "patients_needed": self.patients_needed(self.remedy) if self.remedy != FEDAVG else None,
            "missing": dict(self.missing),
            "calibration": {
                "federations": self.record.number,
                "families": list(self.record.families),
                "seeds": self.record.seeds,
                "norm": self.norm,
                "judged": [
                    {"methods": claim.methods, "over": claim.over, "level": claim.level, **claim.judged}
                    | {"is_said": claim.rule is not None}
                    for claim in self.claims
                ],
            },
        }

    def _all_expected(self, level: str, site: str = "") -> dict[str, Any]:
        """Return the numbers of each method on record; unknown ones are ``None``."""
        gains, yardsticks = {}, self.yardsticks
        for methods in self.record.methods:
            gain, yardstick = self.expected(methods, level, site), yardsticks.get(methods)
            interval80 = yardstick.interval80 if yardstick else None
            gains[methods] = {
                **_numbers(gain),
                "known": gain is not None,
                "yardstick80": interval80 and interval80[1],
                "patients_needed": self.patients_needed(methods),
            }
        return gains

    def _site(self, site: ImageFingerprint) -> dict[str, Any]:
        kinds, together = self.distances[site.site], self.expected(FEDAVG, "site", site.site)
        return {
            "distance": appearance(kinds),
            "distances": dict(kinds),
            "cases": site.cases,
            "looked_at": site.looked_at,
            "patients": site.patients,
            "test_patients": site.test_patients,
            "noise": site.noise,
            **({"scanners": dict(site.scanners)} if site.scanners else {}),
            "expected": self._all_expected("site", site.site),
            "together": together and _numbers(together),
            "detectable": self.detectable(site.test_patients),
        }


def _numbers(gain: Expected | None) -> dict[str, float | None]:
    ends = [(None, None)] * 2 if gain is None else [gain.interval80, gain.interval95]
    (low80, high80), (low95, high95) = (pair or (None, None) for pair in ends)
    mean = None if gain is None else gain.mean
    return {"mean": mean, "low80": low80, "high80": high80, "low95": low95, "high95": high95}


def make_prospect(
    sites: Sequence[ImageFingerprint],
    missing: Mapping[str, str] | None = None,
    *,
    norm: str = "batch",
    pilot: Pilot | None = None,
    record: Path | None = None,
) -> Prospect:
    """Compare the sites' fingerprints, and predict gains from a pilot.

    A prediction is made if it held and beat the yardstick in every family on record, and the pilot converged
    and is within the pilots on record.
    """
    check_together(sites)
    recorded = find_record(METRICS[sites[0].task], norm, record)
    gains: dict[str, dict[str, dict[str, Expected]]] = {level: {} for level in LEVELS}
    for claim in recorded.claims:
        if pilot is not None and not pilot.rising and (after := _after(pilot, sites, recorded, claim)):
            gains[claim.level][claim.methods] = after
    return Prospect(
        sites=tuple(sites),
        distances=distances(sites),
        record=recorded,
        norm=norm,
        pilot=pilot,
        gains=gains,
        missing=dict(missing or {}),
    )


def _after(
    pilot: Pilot, sites: Sequence[ImageFingerprint], record: GainRecord, claim: Claim
) -> dict[str, Expected]:
    """Return expected gains after a pilot, of each site or of the federation under the empty name.

    If the pilot's test patients vary more than the patients on record, its error is added.
    """
    rule, gains = claim.rule, {}
    if rule is None:
        return {}
    for name in pilot.sites if claim.level == "site" else [""]:
        measured = pilot.difference(name, claim.level)
        variance, usual = _variance(pilot, sites, record, claim.level, name), record.variances[claim.level]
        if variance is None or measured > rule.highest:
            continue
        # The same patients measure the pilot and would measure the gain: both have the error.
        more = (1 + rule.slope**2) * max(variance - usual, 0.0)
        gains[name] = rule.predict(measured, falls=claim.over == SINGLE).widened(math.sqrt(more))
    return {name: gain for name, gain in gains.items() if gain.interval80 is not None}


def _variance(
    pilot: Pilot, sites: Sequence[ImageFingerprint], record: GainRecord, level: str, name: str
) -> float | None:
    """Return the variance over test patients of the pilot's difference; for the worst site the largest.

    A site without scores of patients gets the record's deviation; ``None`` if their number is unknown, too.
    """
    usual, tested = record.deviations.get(SINGLE), {one.site: one.test_patients for one in sites}
    of_sites = []
    for site in [name] if name else pilot.sites:
        spread, patients = pilot.patients.get(site, (usual, tested.get(site, 0)))
        if spread is None or not patients:
            return None
        of_sites.append(spread**2 / patients)
    return max(of_sites) if level == "worst" else fmean(of_sites) / len(of_sites)
