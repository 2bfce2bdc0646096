"""`judge_predictions`: predicted gains of federations that took no part in them, against measured ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean

from medfedaug.analysis.calibration_table import FEDAVG, SINGLE, Calibration, TrainedFederation
from medfedaug.analysis.gain_prediction import (
    LEVELS,
    Expected,
    GainModel,
    at_level,
    measured_gains,
    tested_patients,
)

__all__ = [
    "LEAST_FEDERATIONS",
    "Judgement",
    "Prediction",
    "judge_anew",
    "judge_predictions",
    "judge_table",
    "judged_over",
    "left_out",
    "predictions",
    "write_judgements",
]

_RECORD = "analysis/judged.json"

LEAST_FEDERATIONS = 20
"""Judged federations below which coverage is not shown."""

_SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Prediction:
    """A predicted and a measured gain.

    Attributes:
        federation: that was trained, with one seed.
        site: the site; empty where the gain is of the federation.
        gain: as measured.
        expected: as predicted of other federations.
    """

    federation: TrainedFederation
    site: str
    gain: float
    expected: Expected

    @property
    def error(self) -> float:
        """Absolute error of the prediction."""
        return abs(self.expected.mean - self.gain)


@dataclass(frozen=True)
class Judgement:
    """Predictions of federations that took no part in them, against what was measured.

    Attributes:
        methods: the combination.
        over: the methods over which it gains.
        level: one of `medfedaug.analysis.gain_prediction.LEVELS`.
        federations: how many were predicted.
        families: how many families they are of.
        rows: how many gains were predicted: of each site, or one of each federation.
        coverage80: share of the gains within the 80% interval; ``None`` without an interval.
        coverage95: share within the 95% interval.
        width80: mean width of the 80% interval.
        error: mean absolute error.
        error_of_zero: the same of always saying 0.
        standard_error: of the difference of these two, with families as units.
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
    standard_error: float

    @property
    def holds(self) -> bool:
        """Return whether 70 to 90% lie in the 80% interval and 90% or more in the 95% one, of enough."""
        if self.federations < LEAST_FEDERATIONS or self.coverage80 is None or self.coverage95 is None:
            return False
        return 0.7 <= self.coverage80 <= 0.9 and self.coverage95 >= 0.9

    @property
    def has_skill(self) -> bool:
        """Return whether the error is below that of always saying 0, by two standard errors or more."""
        better = self.error_of_zero - self.error
        return self.federations >= LEAST_FEDERATIONS and better > _SURE * self.standard_error


def predictions(
    known: Calibration, asked: Calibration, methods: str, over: str = FEDAVG, level: str = "site"
) -> list[Prediction]:
    """Predict the gains of trained federations from others; empty where these are too few.

    Args:
        known: the federations from which is predicted.
        asked: those that are predicted.
        methods: the combination.
        over: the methods over which it gains.
        level: one of `medfedaug.analysis.gain_prediction.LEVELS`.
    """
    both = [one for one in asked.federations if methods in one.scores and over in one.scores]
    if not both:
        return []
    try:
        model = GainModel(known, methods, over, level)
    except ValueError:
        return []
    found = []
    for one in both:
        x, tested = at_level(one.features, level), tested_patients(one.sites, level)
        for name, gain in measured_gains(one, methods, over, level).items():
            found.append(Prediction(one, name, gain, model.predict(x[name], tested[name])))
    return found


def left_out(table: Calibration, methods: str, over: str = FEDAVG, level: str = "site") -> list[Prediction]:
    """Predict each family's federations from all others."""
    return [
        one
        for family in table.families
        for one in predictions(table.without(family), table.of_family(family), methods, over, level)
    ]


def judge_predictions(
    found: Sequence[Prediction], methods: str, over: str = FEDAVG, level: str = "site"
) -> Judgement | None:
    """Judge predictions.

    Args:
        found: of `left_out` or `predictions`, with the same methods and level.
        methods: the combination.
        over: the methods over which it gains.
        level: one of `medfedaug.analysis.gain_prediction.LEVELS`.

    Returns:
        ``None`` where there are none.
    """
    if not found:
        return None

    def share(name: str) -> float | None:
        ends = [(getattr(one.expected, name), one.gain) for one in found]
        inside = [pair[0] <= gain <= pair[1] for pair, gain in ends if pair is not None]
        return fmean(inside) if len(inside) == len(found) else None

    intervals = [one.expected.interval80 for one in found]
    widths = [pair[1] - pair[0] for pair in intervals if pair is not None]
    better: dict[str, list[float]] = {}
    for one in found:
        better.setdefault(one.federation.family, []).append(abs(one.gain) - one.error)
    mean = fmean(value for values in better.values() for value in values)
    apart = [sum(value - mean for value in values) for values in better.values()]
    return Judgement(
        methods=methods,
        over=over,
        level=level,
        federations=len({one.federation.name for one in found}),
        families=len(better),
        rows=len(found),
        coverage80=share("interval80"),
        coverage95=share("interval95"),
        width80=fmean(widths) if len(widths) == len(found) else None,
        error=fmean(one.error for one in found),
        error_of_zero=fmean(abs(one.gain) for one in found),
        standard_error=math.sqrt(sum(value**2 for value in apart)) / len(found),
    )


def judged_over(methods: str) -> str:
    """The methods over which a gain is judged: FedAvg, and training alone for FedAvg itself."""
    return SINGLE if methods == FEDAVG else FEDAVG


def judge_table(table: Calibration) -> list[Judgement]:
    """Judge each claim of a table by leaving families out; of the package's table from its record."""
    recorded = _recorded(table)
    return judge_anew(table) if recorded is None else recorded


def judge_anew(table: Calibration) -> list[Judgement]:
    """Judge each claim of a table by leaving families out."""
    found = []
    for methods in (FEDAVG, *table.methods):
        over = judged_over(methods)
        for level in LEVELS:
            judged = judge_predictions(left_out(table, methods, over, level), methods, over, level)
            found += [judged] if judged is not None else []
    return found


def write_judgements(table: Calibration, found: Sequence[Judgement], path: Path) -> None:
    """Write a record of judgements; `judge_table` reads that of the package where the table is the same."""
    told = {"table": table.digest, "judged": [asdict(one) for one in found]}
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _recorded(table: Calibration) -> list[Judgement] | None:
    path = files("medfedaug") / _RECORD
    if not path.is_file():
        return None
    told = json.loads(path.read_text(encoding="utf-8"))
    return [Judgement(**one) for one in told["judged"]] if told["table"] == table.digest else None
