"""`GainModel`: the gain to expect of a method, with intervals, from the fingerprints of the sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from medfedaug.analysis.calibration_table import FEDAVG, Calibration, TrainedFederation
from medfedaug.analysis.fingerprint_distance import appearance, distances
from medfedaug.analysis.phantom_gains import gains_at, measured_gains

__all__ = [
    "LEAST_FEDERATIONS",
    "LEVELS",
    "Expected",
    "GainModel",
    "Judgement",
    "at_level",
    "judge_predictions",
]

LEVELS = ("site", "mean", "worst")
"""Levels of a gain: of a site, of the mean over the sites, of the lowest score of a site."""

LEAST_FEDERATIONS = 20
"""Judged federations below which coverage is not shown."""

_PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, math.inf)
"""Penalties of the slopes that are tried; with the last one the prediction is the mean gain."""

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
            half = math.hypot((ends[1] - ends[0]) / 2, z * deviation)
            return self.mean - half, self.mean + half

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


@dataclass(frozen=True)
class _Rows:
    """Features (N, F), gains (N), and of each row family, federation and its weight."""

    x: np.ndarray
    y: np.ndarray
    families: np.ndarray
    federations: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """Every federation counts once."""
        _, inverse, counts = np.unique(self.federations, return_inverse=True, return_counts=True)
        return 1.0 / counts[inverse]

    def among(self, kept: np.ndarray) -> _Rows:
        return _Rows(self.x[kept], self.y[kept], self.families[kept], self.federations[kept])


@dataclass(frozen=True)
class _Line:
    """A linear function of standardised features, within the range of the gains that were measured."""

    middle: np.ndarray
    scale: np.ndarray
    slopes: np.ndarray
    intercept: float
    range: tuple[float, float]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.clip(self.intercept + ((x - self.middle) / self.scale) @ self.slopes, *self.range)


def _fitted(rows: _Rows, penalty: float) -> _Line:
    """Ridge regression, of which every federation counts once."""
    w = rows.weights / rows.weights.sum()
    middle = w @ rows.x
    scale = np.sqrt(w @ (rows.x - middle) ** 2)
    scale = np.where(scale > 1e-6, scale, 1.0)
    z, intercept = (rows.x - middle) / scale, float(w @ rows.y)
    slopes = np.zeros(z.shape[1])
    if math.isfinite(penalty):
        total = len(set(rows.federations.tolist()))
        gram = total * (z.T * w) @ z + penalty * np.eye(z.shape[1])
        slopes = np.linalg.solve(gram, total * (z.T * w) @ (rows.y - intercept))
    return _Line(middle, scale, slopes, intercept, (float(rows.y.min()), float(rows.y.max())))


def _chosen(rows: _Rows, errors: dict[float, np.ndarray]) -> float:
    """The strongest penalty whose error is within a standard error of the least one, over the federations."""
    _, inverse = np.unique(rows.federations, return_inverse=True)
    means = {penalty: np.bincount(inverse, rows.weights * found**2) for penalty, found in errors.items()}
    best = min(means.values(), key=lambda found: float(found.mean()))
    limit = float(best.mean() + best.std(ddof=1) / math.sqrt(len(best)))
    return max(penalty for penalty, found in means.items() if float(found.mean()) <= limit)


def _left_out(rows: _Rows, use: Callable[[_Rows, np.ndarray], np.ndarray]) -> np.ndarray:
    """For each row a number of the rows of all other families: ``use(others, x)``."""
    found = np.zeros(len(rows.y))
    for family in set(rows.families.tolist()):
        there = rows.families == family
        if there.all():  # a single family: federations take its place
            for name in set(rows.federations.tolist()):
                own = rows.federations == name
                if not own.all():
                    found[own] = use(rows.among(~own), rows.x[own])
            continue
        found[there] = use(rows.among(~there), rows.x[there])
    return found


def _nearest(rows: _Rows, x: np.ndarray) -> np.ndarray:
    """Distance of each of x from the nearest row, in deviations, root mean square over the features."""
    scale = rows.x.std(axis=0)
    scale = np.where(scale > 1e-6, scale, 1.0)
    apart = (x[:, None] - rows.x[None]) / scale
    return np.sqrt((apart**2).mean(axis=2)).min(axis=1)


class GainModel:
    r"""A gain as a linear function of a few features, with conformal intervals.

    The slopes are penalised (ridge regression); the penalty is the strongest of some whose mean square error,
    when whole families are left out, is within a standard error of the least. With the strongest of all the
    prediction is the mean gain of all federations. No prediction is outside the range of the measured gains.

    Intervals. With :math:`r_i` the error at row i when its family is left out, :math:`d_i` the distance of
    its features from the nearest row of another family, and :math:`\bar d` the median of these, the scores
    are :math:`|r_i| / s_i`, :math:`s_i = 1 + \max(0, d_i / \bar d - 1)`. The interval of level L around a
    prediction is :math:`\pm q s`, q the quantile :math:`L (n + 1) / n` of the scores, n the number of
    federations, each of which has weight 1 (split conformal prediction, with groups as units). Where that is
    above 1 there is none.

    Deviations:
        Conformal prediction assumes that federations are exchangeable. A user's federation is of no family of
        the table, so the errors are of federations whose whole family was left out; `judge_predictions`
        measures what holds.

    Args:
        table: the federations.
        methods: the combination.
        over: the methods over which it gains.
        level: one of `LEVELS`.

    Raises:
        ValueError: when fewer than two federations were trained with both.
    """

    def __init__(self, table: Calibration, methods: str, over: str = FEDAVG, level: str = "site") -> None:
        rows = _rows(table, methods, over, level)
        if rows is None or len(set(rows.federations.tolist())) < 2:
            raise ValueError(f"fewer than two federations were trained with {methods} and {over}")
        self.rows = rows
        errors = {
            penalty: _left_out(rows, lambda others, x, p=penalty: _fitted(others, p)(x)) - rows.y  # type: ignore[misc]
            for penalty in _PENALTIES
        }
        self.penalty = _chosen(rows, errors)
        self.line = _fitted(rows, self.penalty)
        near = _left_out(rows, _nearest)
        self._usual = max(float(np.median(near)), 1e-6)
        self._far = float(np.quantile(near, _UNLIKE))
        self._scores = np.abs(errors[self.penalty]) / self._scale(near)

    @property
    def federations(self) -> int:
        """The number of federations behind it."""
        return len(set(self.rows.federations.tolist()))

    def _scale(self, near: np.ndarray) -> np.ndarray:
        return 1 + np.maximum(0.0, near / self._usual - 1)

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
        return float(self.line(np.asarray([x], dtype=np.float64))[0])

    def predict(self, x: Sequence[float]) -> Expected:
        """Predict the gain at features (`medfedaug.analysis.calibration_table.features`)."""
        point = np.asarray([x], dtype=np.float64)
        mean, near = float(self.line(point)[0]), _nearest(self.rows, point)
        scale = float(self._scale(near)[0])

        def around(level: float) -> tuple[float, float] | None:
            quantile = self._quantile(level)
            return None if quantile is None else (mean - quantile * scale, mean + quantile * scale)

        return Expected(mean, around(0.8), around(0.95), bool(near[0] > self._far))


def at_level(found: dict[str, list[float]], level: str) -> dict[str, list[float]]:
    """Features of each site, or of the federation: the mean over its sites, under the empty name."""
    if level == "site":
        return found
    return {"": np.mean(list(found.values()), axis=0).tolist()}


def _gains(one: TrainedFederation, methods: str, over: str, level: str) -> dict[str, float]:
    """The measured gain of each site, or of the federation under the empty name."""
    ours, theirs = one.scores[methods], one.scores[over]
    if level == "site":
        return {site: ours[site] - theirs[site] for site in ours.keys() & theirs.keys()}
    summary = fmean if level == "mean" else min
    return {"": summary(ours.values()) - summary(theirs.values())}


def _rows(table: Calibration, methods: str, over: str, level: str) -> _Rows | None:
    found = [
        (x, gains[name], one.family, one.name)
        for one in table.federations
        if methods in one.scores and over in one.scores
        for gains in [_gains(one, methods, over, level)]
        for name, x in sorted(at_level(one.features, level).items())
        if name in gains
    ]
    if not found:
        return None
    x, y, families, federations = zip(*found, strict=True)
    return _Rows(np.array(x), np.array(y), np.array(families), np.array(federations))


@dataclass(frozen=True)
class Judgement:
    """Predictions of federations whose family was left out, against what was measured.

    Attributes:
        methods: the combination.
        over: the methods over which it gains.
        level: one of `LEVELS`.
        federations: how many were predicted.
        families: how many families they are of.
        rows: how many gains were predicted: of each site, or one of each federation.
        coverage80: share of the gains within the 80% interval; ``None`` without an interval.
        coverage95: share within the 95% interval.
        width80: mean width of the 80% interval.
        error: mean absolute error.
        error_of_zero: the same of always saying 0.
        error_of_shift: the same of the gain by distance that `inspect` has, 0 where that has nothing to say;
            ``None`` where it never has.
    """

    methods: str
    over: str
    level: str
    federations: int
    families: int
    rows: int
    coverage80: float | None
    coverage95: float | None
    width80: float | None
    error: float
    error_of_zero: float
    error_of_shift: float | None

    @property
    def holds(self) -> bool:
        """Return whether 70 to 90% lie in the 80% interval and 90% or more in the 95% one, of enough."""
        if self.federations < LEAST_FEDERATIONS or self.coverage80 is None or self.coverage95 is None:
            return False
        return 0.7 <= self.coverage80 <= 0.9 and self.coverage95 >= 0.9

    @property
    def has_skill(self) -> bool:
        """Return whether the error is smaller than that of always saying 0."""
        return self.error < self.error_of_zero


def judge_predictions(
    table: Calibration, methods: str, over: str = FEDAVG, level: str = "site"
) -> Judgement | None:
    """Predict each family's federations from all others.

    Returns:
        ``None`` where fewer than two families were trained with the methods.
    """
    hits80, hits95, widths, errors, zeros, shifts = ([] for _ in range(6))  # type: ignore[var-annotated]
    names, families = set(), set()
    for family in table.families:
        try:
            model = GainModel(table.without(family), methods, over, level)
        except ValueError:
            continue
        for one in table.federations:
            if one.family != family or methods not in one.scores or over not in one.scores:
                continue
            names.add(one.name)
            families.add(family)
            known = _gain_by_shift(one, methods) if over == FEDAVG and level != "worst" else None
            for name, gain in _gains(one, methods, over, level).items():
                found = model.predict(at_level(one.features, level)[name])
                for ends, hits in ((found.interval80, hits80), (found.interval95, hits95)):
                    if ends is not None:
                        hits.append(ends[0] <= gain <= ends[1])
                if found.interval80 is not None:
                    widths.append(found.interval80[1] - found.interval80[0])
                errors.append(abs(found.mean - gain))
                zeros.append(abs(gain))
                if known is not None:
                    shifts.append(abs(known - gain))
    if len(families) < 2:
        return None

    def mean(values: list[float]) -> float | None:
        return fmean(values) if len(values) == len(errors) else None

    return Judgement(
        methods=methods,
        over=over,
        level=level,
        federations=len(names),
        families=len(families),
        rows=len(errors),
        coverage80=mean(hits80),
        coverage95=mean(hits95),
        width80=mean(widths),
        error=fmean(errors),
        error_of_zero=fmean(zeros),
        error_of_shift=mean(shifts),
    )


def _gain_by_shift(one: TrainedFederation, methods: str) -> float | None:
    """The gain that the table by distance has for a federation as far apart; ``None`` for other methods."""
    if not any(gain.methods == methods for gain in measured_gains()):
        return None
    apart = fmean(appearance(kinds) for kinds in distances(one.sites).values())
    return next((gain.mean for gain in gains_at(apart) if gain.methods == methods), 0.0)
