"""Gains of methods over FedAvg on phantom federations, by the shift between their sites."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

__all__ = ["FARTHEST", "MEAN", "Gain", "expectation", "gains_at", "measured_gains"]

MEAN, FARTHEST = "mean", "farthest"
"""Whose gain it is: the mean over the sites, or the gain of the site that is farthest from the others."""

_FILE = "gain_by_distance.csv"
_WORTH = 0.02
"""A smaller gain is none to be expected, however sure it is."""
_ENOUGH = 10
"""Of fewer federations nothing is expected."""


@dataclass(frozen=True)
class Gain:
    """The mean gain in test Dice over FedAvg of federations whose sites were about as far apart.

    Attributes:
        methods: what gained it, as for ``--methods``.
        nearest: the distance from which federations are counted: of the sites
            (`medfedaug.analysis.shift.Shift.shift`), or of the farthest site from the others
            (`medfedaug.analysis.shift.Shift.by_site`).
        farthest: that up to which they are.
        federations: their number; each has patients, scanners and initial weights of its own.
        mean: the gain.
        low: lower end of its 95% interval over the federations.
        high: upper end.
        at: ``"mean"``: over the sites, or ``"farthest"``: at the farthest site.
    """

    methods: str
    nearest: float
    farthest: float
    federations: int
    mean: float
    low: float
    high: float
    at: str = MEAN

    @property
    def is_shown(self) -> bool:
        """Return whether the gain is 0.02 or more, over ten federations or more, with an interval above 0."""
        return self.low > 0 and self.mean >= _WORTH and self.federations >= _ENOUGH


@cache
def measured_gains() -> tuple[Gain, ...]:
    """The gains that ``benchmarks/shift_gain.py`` measured (``docs/results/shift``)."""
    lines = csv.DictReader((resources.files(__package__) / _FILE).read_text(encoding="utf-8").splitlines())
    numbers = ("nearest", "farthest", "mean", "low", "high")
    return tuple(
        Gain(
            at=line["at"],
            methods=line["methods"],
            federations=int(line["federations"]),
            **{name: float(line[name]) for name in numbers},
        )
        for line in lines
    )


def gains_at(distance: float, at: str = MEAN) -> list[Gain]:
    """The measured gains of federations that are about this far apart, of every method; none beyond them.

    Args:
        distance: of the sites, or of the farthest site from the others.
        at: ``"mean"`` or ``"farthest"`` (`Gain.at`).

    Example:
        >>> gains_at(1e6)
        []
    """
    return [gain for gain in measured_gains() if gain.at == at and gain.nearest <= distance < gain.farthest]


def expectation(found: Sequence[Gain]) -> str:
    """Describe the gain to expect, from the gains that were measured.

    A gain is expected of a method alone whose gain was 0.02 or more, on ten federations or more, and surely
    above 0. All other numbers are told as what they are.

    Example:
        >>> expectation([Gain("fedrdn", 2, 3, 12, 0.05, 0.03, 0.07)]).split(":")[0]
        'Expect a gain in the mean of the sites with fedrdn'
        >>> expectation([Gain("fedrdn", 2, 3, 9, 0.05, 0.03, 0.07)]).split(":")[0]
        'No gain is shown in the mean of the sites'
        >>> expectation([Gain("fedrdn", 0, 1, 12, 0.01, -0.01, 0.03, "farthest")]).split(":")[0]
        'No gain is shown there'
    """
    if not found:
        return "No phantom federation was tried that is as far apart."
    sure = [gain for gain in found if gain.is_shown]
    place = "there" if found[0].at == FARTHEST else "in the mean of the sites"
    told = (
        f"Expect a gain {place} with {', '.join(g.methods for g in sure)}: {_measured(sure)}." if sure else ""
    )
    rest = [gain for gain in found if not gain.is_shown]
    if not rest:
        return told
    none = "Of other methods none is shown there" if sure else f"No gain is shown {place}"
    return f"{told} {none}: {_measured(rest)}.".strip()


def _measured(found: Sequence[Gain]) -> str:
    counts = sorted({gain.federations for gain in found})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    span = f"{found[0].nearest:g} to {found[0].farthest:g}"
    where = f"on {number} phantom federations with a shift of {span}"
    if found[0].at == FARTHEST:
        where = f"at the farthest site of {number} phantom federations, {span} away"
    told = ", ".join(f"{g.methods} {g.mean:+.3f} ({g.low:+.3f} to {g.high:+.3f})" for g in found)
    return f"{where}, the gain in Dice over fedavg (95% interval) was {told}"
