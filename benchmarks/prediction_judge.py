"""`judge_table`: compare predictions for held-out families of federations with measured gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from calibration_table import Calibration
from gain_model import GainModel, GainRows, gain_rows, recorded_rows

from medfedaug.analysis.gain_record import FEDAVG, LEAST_FEDERATIONS, LEVELS, SINGLE, Claim, GainRecord

LEAST_FAMILIES = 10
"""Smallest number of judged families."""

_INSIDE = {0.8: 0.7, 0.95: 0.9}
_INSIDE_A_FAMILY = 0.5


@dataclass(frozen=True)
class IntervalRecord:
    """Intervals of one level, by held-out family.

    Attributes:
        level: of the intervals.
        inside: share of the family's gains inside.
        width: mean width.
        loss: mean interval score (Gneiting and Raftery, 2007): the width, and beyond an end 2 / (1 - L) times
            the distance from it. A narrow interval that misses costs more than a wide one that holds.
    """

    level: float
    inside: Mapping[str, float]
    width: Mapping[str, float]
    loss: Mapping[str, float]

    @property
    def coverage(self) -> float:
        """Return the share inside, in the mean of the families."""
        return fmean(self.inside.values())

    @property
    def worst(self) -> str:
        """Return the family with the smallest share inside."""
        return min(self.inside, key=lambda family: self.inside[family])

    @property
    def holds(self) -> bool:
        """Return whether 70% (90% in 95% intervals) lie inside in the mean, and half in each family."""
        return self.coverage >= _INSIDE[self.level] and self.inside[self.worst] >= _INSIDE_A_FAMILY

    def beats(self, other: IntervalRecord) -> bool:
        """Return whether it is narrower and has less loss, with each family left out in turn too."""
        gains = {family: other.loss[family] - loss for family, loss in self.loss.items()}
        without = [sum(gains.values()) - one for one in gains.values()]
        narrower = fmean(self.width.values()) <= fmean(other.width.values())
        return narrower and sum(gains.values()) > 0 and min(without) > 0


@dataclass(frozen=True)
class Judgement:
    """Predictions for held-out families, after a pilot and by the yardstick.

    Attributes:
        methods: the combination.
        over: the methods of the comparison.
        level: one of `medfedaug.analysis.gain_record.LEVELS`.
        federations: number of predicted federations.
        rows: number of predicted gains.
        error: mean absolute error, in the mean of the families.
        error_of_zero: the same for a prediction of 0.
        pilot: the 80% and the 95% intervals after a pilot; empty for too few federations.
        yardstick: the intervals of a prediction of 0.
    """

    methods: str
    over: str
    level: str
    federations: int
    rows: int
    error: float
    error_of_zero: float
    pilot: tuple[IntervalRecord, ...]
    yardstick: tuple[IntervalRecord, ...]

    @property
    def families(self) -> int:
        """Return the number of families."""
        return len(self.pilot[0].inside) if self.pilot else 0

    @property
    def is_enough(self) -> bool:
        """Return whether federations and families are enough for a judgement."""
        return self.federations >= LEAST_FEDERATIONS and self.families >= LEAST_FAMILIES

    @property
    def holds(self) -> bool:
        """Return whether both intervals hold, for enough federations."""
        return self.is_enough and all(one.holds for one in self.pilot)

    @property
    def beats(self) -> bool:
        """Return whether both intervals beat the yardstick."""
        return self.is_enough and all(
            one.beats(other) for one, other in zip(self.pilot, self.yardstick, strict=True)
        )

    @property
    def is_said(self) -> bool:
        """Return whether `medfedaug prospect` may make the prediction."""
        return self.holds and self.beats


def record_intervals(rows: GainRows, *, yardstick: bool) -> tuple[tuple[IntervalRecord, ...], float]:
    """Predict each family from all others.

    Returns:
        The 80% and the 95% intervals, and the mean absolute error; empty for too few other families.
    """
    models = {
        family: (GainModel(rows.among(~inside), yardstick=yardstick), rows.among(inside))
        for family, inside in rows.by_family()
    }
    errors = {
        family: np.abs(own.gains - np.array([model.mean_at(pilot) for pilot in own.pilot]))
        for family, (model, own) in models.items()
    }
    records = []
    for level in _INSIDE:
        halves = {family: model.half_width(level) for family, (model, _) in models.items()}
        known = {family: half for family, half in halves.items() if half is not None}
        if len(known) < len(halves):
            return (), 0.0
        beyond = {family: np.maximum(errors[family] - half, 0) for family, half in known.items()}
        records.append(
            IntervalRecord(
                level,
                inside={family: float(np.mean(over == 0)) for family, over in beyond.items()},
                width={family: 2 * half for family, half in known.items()},
                loss={f: 2 * known[f] + 2 / (1 - level) * float(over.mean()) for f, over in beyond.items()},
            )
        )
    return tuple(records), fmean(float(one.mean()) for one in errors.values())


def judge_rows(rows: GainRows, methods: str, over: str, level: str) -> Judgement:
    """Judge the predictions of some gains."""
    few = len(rows.by_family()) < 3  # without one of two families, none is left to hold out
    (pilot, error), (yardstick, zero) = (
        ((), 0.0) if few else record_intervals(rows, yardstick=flat) for flat in (False, True)
    )
    return Judgement(methods, over, level, rows.number, len(rows.gains), error, zero, pilot, yardstick)


def judged_over(methods: str) -> str:
    """Return the methods of the comparison: FedAvg, and training alone for FedAvg itself."""
    return SINGLE if methods == FEDAVG else FEDAVG


def judge_table(table: Calibration) -> list[Judgement]:
    """Judge each claim of a table by leaving families out."""
    return [
        judge_rows(rows, methods, judged_over(methods), level)
        for methods in (FEDAVG, *(name for name in table.methods if name != SINGLE))
        for level in LEVELS
        if (rows := gain_rows(table, methods, judged_over(methods), level)) is not None
    ]


def record_of(table: Calibration) -> GainRecord:
    """Summarise federations with one norm and one metric, for `medfedaug prospect`."""
    judged = (FEDAVG, *(name for name in table.methods if name != SINGLE))
    rows = {name: recorded_rows(table, name, judged_over(name)) for name in judged}
    deviations = {name: table.patient_deviation(name) for name in table.methods}
    return GainRecord(
        number=table.number,
        families=tuple(table.families),
        seeds=table.seeds,
        methods=tuple(table.methods),
        gained={name: table.gained(name) for name in table.methods},
        deviations={name: spread for name, spread in deviations.items() if spread is not None},
        variances={level: _variance(table, level) for level in LEVELS},
        yardsticks={
            name: GainModel(gains, yardstick=True).halves for name, gains in rows.items() if gains is not None
        },
        claims=tuple(_claim(table, one) for one in judge_table(table)),
    )


def _claim(table: Calibration, one: Judgement) -> Claim:
    names = ("federations", "families", "rows", "error", "error_of_zero", "holds", "beats")
    judged: dict[str, Any] = {name: getattr(one, name) for name in names}
    for name, records in (("pilot", one.pilot), ("yardstick", one.yardstick)):
        for record in records:
            entry = {"inside": dict(record.inside), "width": fmean(record.width.values())}
            judged[f"{name}{100 * record.level:.0f}"] = entry
    rows = gain_rows(table, one.methods, one.over, one.level)
    rule = None if rows is None or not one.is_said else GainModel(rows).rule
    return Claim(one.methods, one.over, one.level, judged, rule)


def _variance(table: Calibration, level: str) -> float:
    """Return the median variance over test patients of training alone minus FedAvg, of a site or a mean."""
    variances = []
    for one in table.federations:
        spreads = one.deviations.get(SINGLE, ())
        numbers = [site.test_patients for site in one.sites]
        if len(spreads) == len(numbers):
            of_sites = [spread**2 / max(n, 1) for spread, n in zip(spreads, numbers, strict=True)]
            variances += [fmean(of_sites) / len(of_sites)] if level == "mean" else of_sites
    return median(variances) if variances else 0.0
