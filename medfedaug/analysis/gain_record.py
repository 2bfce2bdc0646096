"""`GainRecord`: gains of recorded federations, and predictions after a pilot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from medfedaug.errors import ConfigError, first_line

FEDAVG, SINGLE = "fedavg", "single"
LEVELS = ("site", "mean", "worst")
"""Levels of a gain: of a site, of the mean over the sites, of the lowest score of a site."""
LEAST_FEDERATIONS = 20
"""Judged federations below which nothing is shown."""

_RECORD = "analysis/gain_record.json"
_WIDEST = 1.0  # an interval this wide says nothing: half of the possible gains, from -1 to 1
_Z = (1.2816, 1.9600)  # of the normal distribution, 80% and 95%

Interval = tuple[float, float]
Halves = tuple[float | None, float | None]
"""Half widths of an 80% and a 95% interval; ``None`` for a level with too few federations."""


@dataclass(frozen=True)
class Expected:
    """A predicted gain with intervals.

    Attributes:
        mean: the gain.
        interval80: its 80% interval; ``None`` if the record has too few federations, or the interval covers
            half of the possible gains or more.
        interval95: its 95% interval.
    """

    mean: float
    interval80: Interval | None
    interval95: Interval | None

    @classmethod
    def around(cls, mean: float, halves: Halves) -> Expected:
        """Return a gain with intervals of half widths."""
        known = [None if half is None or 2 * half >= _WIDEST else half for half in halves]
        ends = [None if half is None else (max(mean - half, -1.0), min(mean + half, 1.0)) for half in known]
        return cls(mean, *ends)

    def widened(self, deviation: float) -> Expected:
        """Widen the intervals by the deviation of a further error, added in squares."""
        halves = [
            None if ends is None else math.hypot((ends[1] - ends[0]) / 2, z * deviation)
            for ends, z in zip((self.interval80, self.interval95), _Z, strict=True)
        ]
        return Expected.around(self.mean, (halves[0], halves[1]))


@dataclass(frozen=True)
class Rule:
    r"""Prediction of a gain from p, a pilot's training alone minus FedAvg.

    A gain over FedAvg is :math:`b \max(0, p)`: a method can give back the loss of averaging, and gains
    nothing without a loss. FedAvg's gain over training alone is :math:`-b p`.

    Attributes:
        slope: b.
        highest: the largest pilot on record; beyond it nothing is predicted.
        halves: half widths of the intervals.
    """

    slope: float
    highest: float
    halves: Halves

    def predict(self, pilot: float, *, falls: bool) -> Expected:
        """Predict a gain; `falls` for FedAvg's gain over training alone."""
        return Expected.around(self.slope * (-pilot if falls else max(pilot, 0.0)), self.halves)


@dataclass(frozen=True)
class Claim:
    """Predictions after a pilot, judged with whole families of federations left out.

    Attributes:
        over: the methods over which it gains.
        level: one of `LEVELS`.
        judged: the numbers of the judgement, as in ``prospect.json``.
        rule: the prediction; ``None`` unless it held and beat the yardstick.
    """

    methods: str
    over: str
    level: str
    judged: Mapping[str, Any]
    rule: Rule | None


@dataclass(frozen=True)
class GainRecord:
    """Recorded federations with one norm and metric, as ``benchmarks/judge_prospect.py`` summarises them.

    Attributes:
        number: the number of federations with any number of seeds.
        seeds: the largest number of seeds of a federation.
        methods: the methods that some federation was trained with, without FedAvg.
        gained: by methods, the number of trainings whose mean over the sites was above FedAvg's, and of all.
        deviations: by methods, the median over sites of the patients' deviation of a difference from FedAvg.
        variances: by level, the median variance over test patients of training alone minus FedAvg.
        yardsticks: by methods, half widths of the recorded gains around 0 in the mean of the sites; of
            ``fedavg`` the gain over training alone.
        claims: the judged predictions.
    """

    number: int = 0
    families: tuple[str, ...] = ()
    seeds: int = 0
    methods: tuple[str, ...] = ()
    gained: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    deviations: Mapping[str, float] = field(default_factory=dict)
    variances: Mapping[str, float] = field(default_factory=dict)
    yardsticks: Mapping[str, Halves] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()


@cache
def find_record(metric: str, norm: str = "batch", path: Path | None = None) -> GainRecord:
    """Return the record of federations with a metric and a norm; by default an empty one."""
    try:
        text = (path or files("medfedaug") / _RECORD).read_text(encoding="utf-8")
        records = TypeAdapter(dict[str, dict[str, GainRecord]]).validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{path}: is no record of gains ({error.errors()[0]['msg']})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a record of gains ({first_line(error)})") from error
    return records.get(norm, {}).get(metric, GainRecord())


def score_differences(
    scores: Mapping[str, Mapping[str, float]], ours: str, theirs: str, level: str
) -> dict[str, float]:
    """Return one method's scores minus another's, of each site, or of the federation under the empty name."""
    first, second = (
        scores[name] if level == "site" else {"": (fmean if level == "mean" else min)(scores[name].values())}
        for name in (ours, theirs)
    )
    return {name: first[name] - second[name] for name in sorted(first.keys() & second.keys())}
