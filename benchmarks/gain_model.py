"""`GainModel`: the expected gain of a method after a pilot, and the yardstick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

import numpy as np
from calibration_table import Calibration

from medfedaug.analysis.gain_record import FEDAVG, SINGLE, Expected, Halves, Rule, score_differences


@dataclass(frozen=True)
class GainRows:
    """Measured gains, each with the pilot of another training.

    Attributes:
        pilot: training alone minus FedAvg, measured with another seed, (N,).
        gains: (N,).
        families: of each row, (N,).
        federations: of each row, (N,).
        falls: whether the gain is over training alone, and so falls with the pilot.
    """

    pilot: np.ndarray
    gains: np.ndarray
    families: np.ndarray
    federations: np.ndarray
    falls: bool

    @cached_property
    def lost(self) -> np.ndarray:
        """Return the part of the pilot that a gain may follow, (N,)."""
        return lost(self.pilot, falls=self.falls)

    @cached_property
    def weights(self) -> np.ndarray:
        """Return weights with which every federation counts once, (N,)."""
        _, inverse, counts = np.unique(self.federations, return_inverse=True, return_counts=True)
        return np.asarray(1.0 / counts[inverse])

    @property
    def number(self) -> int:
        """Return the number of federations."""
        return len(set(self.federations.tolist()))

    def among(self, kept: np.ndarray) -> GainRows:
        """Keep rows by a mask."""
        arrays = {name: getattr(self, name)[kept] for name in ("pilot", "gains", "families", "federations")}
        return replace(self, **arrays)

    def by_family(self) -> list[tuple[str, np.ndarray]]:
        """Return each family with the mask of its rows."""
        return [(str(name), self.families == name) for name in dict.fromkeys(self.families.tolist())]


class GainModel:
    r"""A gain predicted from a pilot, with conformal intervals; or the yardstick, which is always 0.

    With p the pilot, training alone minus FedAvg, the predicted gain over FedAvg is :math:`b \max(0, p)`: a
    method can regain the loss of averaging only. FedAvg's predicted gain over training alone is
    :math:`-b p`. The slope b is the least squares slope, in which every federation counts once.

    The interval of level L is the prediction plus and minus the quantile :math:`L (n + 1) / n` of the
    absolute errors of the rows, each predicted without its family, with n federations of the same weight
    (split conformal prediction, with groups as units). It is unknown for a quantile above 1, and where it
    covers half of the possible gains. Fewer test cases do not make it narrower (`Expected.widened`).

    Args:
        rows: of `gain_rows`, or of `recorded_rows` for the yardstick.
        yardstick: predict 0 for every pilot.

    Deviations:
        Conformal prediction assumes that federations are exchangeable. A user's federation is of no family of
        the table; `prediction_judge` measures the coverage for held-out families.
    """

    def __init__(self, rows: GainRows, *, yardstick: bool = False) -> None:
        self.rows, self.yardstick = rows, yardstick
        self.slope = self._fit(rows)
        errors = np.zeros(len(rows.gains))
        for _, inside in rows.by_family():
            errors[inside] = rows.gains[inside] - self._fit(rows.among(~inside)) * rows.lost[inside]
        self._errors = np.abs(errors)

    def _fit(self, rows: GainRows) -> float:
        squares = float(rows.weights @ rows.lost**2)
        if self.yardstick or squares == 0:
            return 0.0
        return float(rows.weights @ (rows.lost * rows.gains)) / squares

    def half_width(self, level: float) -> float | None:
        """Return the half width of an interval; ``None`` for too few federations."""
        n = self.rows.number
        wanted = level * (n + 1) / n
        if wanted > 1:
            return None
        order = np.argsort(self._errors)
        reached = np.cumsum(self.rows.weights[order]) / self.rows.weights.sum()
        place = min(int(np.searchsorted(reached, wanted - 1e-9)), len(order) - 1)
        return float(self._errors[order][place])

    def mean_at(self, pilot: float) -> float:
        """Predict the gain without intervals."""
        return self.slope * float(lost(np.array([pilot]), falls=self.rows.falls)[0])

    @property
    def halves(self) -> Halves:
        """Return the half widths of the 80% and the 95% interval."""
        return self.half_width(0.8), self.half_width(0.95)

    @property
    def rule(self) -> Rule:
        """Return the prediction; the largest pilot of the table is its limit."""
        return Rule(self.slope, float(self.rows.pilot.max()), self.halves)

    def predict(self, pilot: float = 0.0) -> Expected:
        """Predict the gain after a pilot."""
        return Expected.around(self.mean_at(pilot), self.halves)


def lost(pilot: np.ndarray, *, falls: bool) -> np.ndarray:
    """Return the part of a pilot that a gain follows: for one over FedAvg the loss of averaging."""
    return -pilot if falls else np.maximum(pilot, 0.0)


def gain_rows(table: Calibration, methods: str, over: str = FEDAVG, level: str = "mean") -> GainRows | None:
    """Pair each gain with the pilot of each other seed of its federation; ``None`` for no pairs."""
    by_name: dict[str, list] = {}
    for one in table.federations:
        by_name.setdefault(one.name, []).append(one)
    rows = [
        (pilot[name], gain, ours.family, ours.name)
        for seeds in by_name.values()
        for ours, other in permutations(seeds, 2)
        if {methods, over} <= ours.scores.keys() and {SINGLE, FEDAVG} <= other.scores.keys()
        for pilot in [score_differences(other.scores, SINGLE, FEDAVG, level)]
        for name, gain in score_differences(ours.scores, methods, over, level).items()
        if name in pilot
    ]
    return _rows(rows, over)


def recorded_rows(
    table: Calibration, methods: str, over: str = FEDAVG, level: str = "mean"
) -> GainRows | None:
    """Return all gains of the table, for the yardstick; their pilots are 0."""
    rows = [
        (0.0, gain, one.family, one.name)
        for one in table.federations
        if {methods, over} <= one.scores.keys()
        for gain in score_differences(one.scores, methods, over, level).values()
    ]
    return _rows(rows, over)


def _rows(rows: list[tuple[float, float, str, str]], over: str) -> GainRows | None:
    if len({name for *_, name in rows}) < 2:
        return None
    pilot, gains, families, federations = (np.array(column) for column in zip(*rows, strict=True))
    return GainRows(pilot, gains, families, federations, falls=over == SINGLE)
