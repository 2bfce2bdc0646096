"""`GainModel`: the gain to expect of a method, with intervals, from the fingerprints of the sites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import numpy as np

from medfedaug.analysis.calibration_table import FEATURES, FEDAVG, SINGLE, Calibration, TrainedFederation
from medfedaug.analysis.gain_effects import GainRows, Way, distance_to_nearest, ways_to_predict
from medfedaug.data.quality.image_fingerprint import ImageFingerprint

__all__ = ["LEVELS", "Expected", "GainModel", "at_level", "measured_gains", "tested_patients"]

LEVELS = ("site", "mean", "worst")
"""Levels of a gain: of a site, of the mean over the sites, of the lowest score of a site."""

_Z80, _Z95 = 1.2816, 1.9600  # of the normal distribution

_UNLIKE = 0.95
"""Quantile of the distances between families beyond which a federation is unlike anything measured."""


@dataclass(frozen=True)
class Expected:
    """A predicted gain with intervals; an interval is ``None`` where the table has too few federations.

    Attributes:
        mean: the gain.
        interval80: its 80% interval.
        interval95: its 95% interval.
        is_unlike: whether the fingerprints are unlike anything in the table.
        from_noise: deviation of the prediction by the noise that sites added to their fingerprints.
    """

    mean: float
    interval80: tuple[float, float] | None
    interval95: tuple[float, float] | None
    is_unlike: bool
    from_noise: float = 0.0

    def widened(self, deviation: float) -> Expected:
        """Widen the intervals by the noise of fingerprints, whose error adds in squares to that of the gain.

        Args:
            deviation: of the prediction by that noise.
        """

        def wider(ends: tuple[float, float] | None, z: float) -> tuple[float, float] | None:
            if ends is None:
                return None
            low, high = (math.hypot(end - self.mean, z * deviation) for end in ends)
            return _possible(self.mean - low, self.mean + high)

        intervals = wider(self.interval80, _Z80), wider(self.interval95, _Z95)
        return replace(self, interval80=intervals[0], interval95=intervals[1], from_noise=deviation)

    def to_dict(self) -> dict[str, float | bool | None]:
        """Return the numbers as ``prospect.json`` has them."""
        found: dict[str, float | bool | None] = {
            "mean": self.mean,
            "unlike_anything_measured": self.is_unlike,
            "deviation_from_noise": self.from_noise,
        }
        for name, ends in (("80", self.interval80), ("95", self.interval95)):
            low, high = ends or (None, None)
            found |= {f"low{name}": low, f"high{name}": high}
        return found


class GainModel:
    r"""A gain predicted from a few features, with conformal intervals.

    The way to predict is the simplest of `medfedaug.analysis.gain_effects.ways_to_predict` whose mean square
    error, when whole families are left out, is within a standard error of the least. The standard error is
    that of the difference over families. With the simplest of all the prediction is 0.

    Intervals. With :math:`r_i` the error at row i when its family is left out, :math:`d_i` the distance of
    its features from the nearest row of another family, :math:`\bar d` the median of these, and :math:`v_i`
    the variance of a measured gain by its number of test patients, the scores are :math:`|r_i| / s_i`,
    :math:`s_i^2 = \tau^2 f_i^2 + v_i`, :math:`f_i = 1 + \max(0, d_i / \bar d - 1)`, where
    :math:`\tau^2 = \sum (r_i^2 - v_i) / \sum f_i^2`, at least a tenth of what it is without v. The interval
    of level L around a prediction is :math:`\pm q s`, q the quantile :math:`L (n + 1) / n` of the scores, n
    the number of federations, each of which has weight 1 (split conformal prediction, with groups as units).
    Where that is above 1 there is none; no end is beyond a gain of 1 or -1. The interval is of a gain that is
    measured with the sites' own test patients.

    Deviations:
        Conformal prediction assumes that federations are exchangeable. A user's federation is of no family of
        the table, so the errors are of federations whose whole family was left out;
        `medfedaug.analysis.prediction_judge.judge_predictions` measures what holds.

    Args:
        table: the federations.
        methods: the combination.
        over: the methods over which it gains.
        level: one of `LEVELS`.

    Raises:
        ValueError: when fewer than two federations were trained with both.
    """

    def __init__(self, table: Calibration, methods: str, over: str = FEDAVG, level: str = "site") -> None:
        self.deviation = _patient_deviation(table, methods, over)
        rows = _rows(table, methods, over, level, self.deviation)
        if rows is None or rows.number < 2:
            raise ValueError(f"fewer than two federations were trained with {methods} and {over}")
        self.level, self.rows = level, rows
        ways = ways_to_predict(_signs(methods, over))
        errors = [rows.left_out(partial(_of_way, way)) - rows.y for way in ways]
        chosen = _simplest(rows, errors)
        self.way = ways[chosen]
        self.predictor = self.way.fit(rows)
        near = rows.left_out(distance_to_nearest)
        self._usual = max(float(np.median(near)), 1e-6)
        self._far = float(np.quantile(near, _UNLIKE))
        squares, factors, w = errors[chosen] ** 2, self._factor(near) ** 2, rows.weights
        spread = max(float(w @ (squares - rows.variances)), 0.1 * float(w @ squares)) / float(w @ factors)
        self._spread = max(spread, 1e-9)
        self._scores = np.abs(errors[chosen]) / self._scale(near, rows.variances)

    @property
    def federations(self) -> int:
        """The number of federations behind it."""
        return self.rows.number

    @property
    def explanation(self) -> str:
        """A description of the prediction and what it rests on."""
        return self.predictor.explain(FEATURES)

    def _factor(self, near: np.ndarray) -> np.ndarray:
        return np.asarray(1 + np.maximum(0.0, near / self._usual - 1))

    def _scale(self, near: np.ndarray, variances: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(self._spread * self._factor(near) ** 2 + variances))

    def _quantile(self, level: float) -> float | None:
        n = self.federations
        wanted = level * (n + 1) / n
        if wanted > 1:
            return None
        order = np.argsort(self._scores)
        reached = np.cumsum(self.rows.weights[order]) / self.rows.weights.sum()
        return float(self._scores[order][min(int(np.searchsorted(reached, wanted - 1e-9)), len(order) - 1)])

    def mean_at(self, x: Sequence[float]) -> float:
        """Predict the gain at features, without intervals."""
        return float(self.predictor(np.asarray([x], dtype=np.float64))[0])

    def predict(self, x: Sequence[float], tested: Sequence[int]) -> Expected:
        """Predict the gain that a number of test patients would show.

        Args:
            x: features (`medfedaug.analysis.calibration_table.features`), of a site or the mean over sites.
            tested: test patients, of the site or of each site.
        """
        point = np.asarray([x], dtype=np.float64)
        mean, near = self.mean_at(x), distance_to_nearest(self.rows, point)
        variance = _variance(self.deviation, tested, self.level)
        scale = float(self._scale(near, np.array([variance]))[0])

        def around(level: float) -> tuple[float, float] | None:
            quantile = self._quantile(level)
            if quantile is None:
                return None
            return _possible(mean - quantile * scale, mean + quantile * scale)

        return Expected(mean, around(0.8), around(0.95), bool(near[0] > self._far))


def _possible(low: float, high: float) -> tuple[float, float]:
    """An interval without gains that no score between 0 and 1 allows."""
    return max(low, -1.0), min(high, 1.0)


def _of_way(way: Way, others: GainRows, x: np.ndarray) -> np.ndarray:
    return way.fit(others)(x)


def _simplest(rows: GainRows, errors: Sequence[np.ndarray]) -> int:
    """The first way whose mean square error is within a standard error of the least one.

    Every federation counts once; the standard error is of the difference, with families as units.
    """
    w = rows.weights / rows.weights.sum()
    squares = [found**2 for found in errors]
    least = min(squares, key=lambda found: float(w @ found))
    for number, found in enumerate(squares):
        excess = found - least
        mean = float(w @ excess)
        apart = w * (excess - mean)
        by_family = [apart[rows.families == family].sum() for family in set(rows.families.tolist())]
        if mean <= math.sqrt(sum(value**2 for value in by_family)):
            return number
    raise AssertionError("the way of the least error is within a standard error of itself")


def _signs(methods: str, over: str) -> tuple[int, ...]:
    """In which direction a gain can change with each of `FEATURES`.

    Sites that differ more can only gain more by what is made for them, and lose more by plain averaging.
    """
    distances = len(FEATURES) - 2
    if over == FEDAVG:
        return (1,) * distances + ((1, -1) if methods == SINGLE else (0, 0))
    if methods == FEDAVG:
        return (-1,) * distances + (-1, 1)
    return (0,) * len(FEATURES)


def _patient_deviation(table: Calibration, methods: str, over: str) -> float:
    """Deviation over patients of the gain; 0 where it is not known."""
    known = [table.patient_deviation(name) for name in (methods, over) if name != FEDAVG]
    return max((value for value in known if value), default=0.0)


def _variance(deviation: float, tested: Sequence[int], level: str) -> float:
    """Variance of a measured gain by the number of test patients of each site."""
    of_sites = [deviation**2 / max(number, 1) for number in tested]
    return fmean(of_sites) / (len(of_sites) if level == "mean" else 1)


def at_level(found: dict[str, list[float]], level: str) -> dict[str, list[float]]:
    """Features of each site, or of the federation: the mean over its sites, under the empty name."""
    if level == "site":
        return found
    return {"": np.mean(list(found.values()), axis=0).tolist()}


def tested_patients(sites: Sequence[ImageFingerprint], level: str) -> dict[str, list[int]]:
    """Numbers of test patients of each site, or of all sites under the empty name."""
    if level == "site":
        return {site.site: [site.test_patients] for site in sites}
    return {"": [site.test_patients for site in sites]}


def measured_gains(one: TrainedFederation, methods: str, over: str, level: str) -> dict[str, float]:
    """Return the measured gain of each site, or of the federation under the empty name."""
    ours, theirs = one.scores[methods], one.scores[over]
    if level == "site":
        return {site: ours[site] - theirs[site] for site in ours.keys() & theirs.keys()}
    summary = fmean if level == "mean" else min
    return {"": summary(ours.values()) - summary(theirs.values())}


def _rows(table: Calibration, methods: str, over: str, level: str, deviation: float) -> GainRows | None:
    found = []
    for one in table.federations:
        if methods not in one.scores or over not in one.scores:
            continue
        gains, tested = measured_gains(one, methods, over, level), tested_patients(one.sites, level)
        for name, x in sorted(at_level(one.features, level).items()):
            if name in gains:
                variance = _variance(deviation, tested[name], level)
                found.append((x, gains[name], variance, one.family, one.name))
    return GainRows(*(np.array(column) for column in zip(*found, strict=True))) if found else None
