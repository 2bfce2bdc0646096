"""Measured gains over FedAvg, the table of ``docs/results``."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_TABLE = "analysis/recorded_gains.csv"
Interval = tuple[float, float]


@dataclass(frozen=True)
class RecordedGain:
    """The gain of a combination of methods over FedAvg in one experiment.

    Attributes:
        experiment: the data set, and how it was tested.
        over: the unit of the interval.
        gain: the difference of the mean score: Dice, but for Office-Caltech 10, CIFAR-10 and PACS (accuracy).
        interval: its 95% interval.
        num_trainings: the number of trainings with different seeds; 0 if federations share seeds.
        num_cases: the number of patients, or images; 0 for an interval over federations alone.
        text: gain and interval as text.
        verdict: result of the report's rule (`medfedaug.analysis.verdict`) on the recorded runs, computed by
            ``benchmarks/recorded_gains.py``; ``"open"`` with too few trainings.
    """

    experiment: str
    over: str
    methods: str
    gain: float
    interval: Interval
    num_trainings: int
    num_cases: int
    text: str
    verdict: str


@cache
def recorded_gains() -> tuple[RecordedGain, ...]:
    """Return all rows of the table, in its order."""
    text = (files("medfedaug") / _TABLE).read_text(encoding="utf-8")
    return tuple(
        RecordedGain(
            experiment=row["experiment"],
            over=row["over"],
            methods=row["methods"],
            gain=float(row["gain"]),
            interval=(float(row["low"]), float(row["high"])),
            num_trainings=int(row["trainings"] or 0),
            num_cases=int(row["cases"] or 0),
            text=f"{row['gain']} ({row['low']} to {row['high']})",
            verdict=row["verdict"],
        )
        for row in csv.DictReader(text.splitlines())
    )


def gains_of(method: str) -> list[str]:
    """Return a line for each experiment with a method, alone or with others.

    Example:
        >>> gains_of("fedfd_a")
        ['PACS, each site left out: +0.060 (+0.032 to +0.088), over images, one seed; open']
    """
    return [
        f"{gain.experiment}{'' if gain.methods == method else f', {gain.methods}'}: "
        f"{gain.text}, over {gain.over}; {gain.verdict}"
        for gain in recorded_gains()
        if method in (gain.methods, *gain.methods.split(","))
    ]
