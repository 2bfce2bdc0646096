"""A small trial on a user's own data: which methods to try, and what their scores recommend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from medfedaug.analysis.inspection_page import federation_shift, foreign_sites
from medfedaug.analysis.phantom_gains import FARTHEST, Gain, gains_at
from medfedaug.analysis.score_table import Row, Table
from medfedaug.analysis.shift import Shift
from medfedaug.data.quality.inspection import SiteInspection
from medfedaug.metrics.registry import find_metric
from medfedaug.runs.run import BASELINE

__all__ = ["ALONE", "Suggestion", "recommend", "suggest"]

ALONE = "single"
_CHEAPEST = "norm"
"""The method to try where nothing else is suggested: sites keep their own pairs, and exchange nothing."""


@dataclass(frozen=True)
class Suggestion:
    """Methods to try on the data of a federation.

    Args:
        methods: beside training alone and plain averaging.
        reason: why, in a sentence.
    """

    methods: tuple[str, ...]
    reason: str


def suggest(found: Sequence[SiteInspection]) -> Suggestion:
    """Suggest methods for sites as far apart as these.

    Suggested is what gained on phantom federations of that distance (`Gain.is_shown`), at most two, those
    that gained most; *norm* where nothing did, and where the sites' images are foreign to each other.

    Args:
        found: of `medfedaug.data.quality.inspection.inspect_sites`.
    """
    if foreign_sites(found):
        reason = "images lie far from 0 under other sites' statistics, where fedrdn fell below norm"
        return Suggestion((_CHEAPEST,), reason)
    shift = federation_shift(found)
    shown = sorted(_shown(shift), key=lambda gain: -gain.mean) if shift is not None else []
    names = tuple(dict.fromkeys(gain.methods for gain in shown))[:2]
    if not names:
        return Suggestion(
            (_CHEAPEST,), "no method gained on phantom sites that far apart, and norm costs least"
        )
    best = shown[0]
    where = "at the farthest site" if best.at == FARTHEST else "in the mean of the sites"
    gained = f"{best.methods} gained {best.mean:.3f} ({best.low:.3f} to {best.high:.3f}) {where}"
    return Suggestion(names, f"{gained} of {best.federations} phantom federations that far apart")


def _shown(shift: Shift) -> list[Gain]:
    apart = shift.by_site
    found = [*gains_at(shift.shift), *gains_at(apart[shift.farthest], FARTHEST)]
    return [gain for gain in found if gain.is_shown]


def recommend(scores: Table) -> list[str]:
    """Recommend what to do next, from the scores of a trial, each with what it rests on.

    Args:
        scores: with a row for `single`, for `fedavg` and for what was tried.

    Returns:
        Sentences: together or alone, the method to go on with, and what would make it sure.
    """
    if scores.nothing_learned:
        return [f"Nothing was learned, and nothing follows: {scores.nothing_learned}."]
    rows = {row.label: row for row in scores.rows if row.mean.mean is not None}
    told, metric = [], find_metric(scores.metric)
    sign = 1 if metric.higher_is_better else -1
    together = {label: row for label, row in rows.items() if label != ALONE}
    if not together:
        return [f"No run of a federation has a {metric.in_text}."]
    best = max(together.values(), key=lambda row: sign * fmean(row.mean.values))
    if ALONE in rows:
        told.append(
            _compared(
                best, rows[ALONE], sign, "Train together", "Stay alone, as it looks now", metric.in_text
            )
        )
    if best.label != BASELINE and BASELINE in rows:
        told.append(_compared(best, rows[BASELINE], sign, f"Go on with {best.label}", "", metric.in_text))
    elif BASELINE in rows:
        told.append(f"Go on with {BASELINE}: no other method that was tried scored above it.")
    told.append(
        f"That rests on {len(best.seeds)} trainings of a few rounds, and is no verdict: `medfedaug "
        "benchmark` with five seeds, folds and the rounds that you need gives one."
    )
    return told


def _compared(row: Row, other: Row, sign: int, ahead: str, behind: str, metric: str) -> str:
    by_seed = dict(zip(other.seeds, other.mean.values, strict=False))
    pairs = [
        (ours, by_seed[seed])
        for seed, ours in zip(row.seeds, row.mean.values, strict=False)
        if seed in by_seed
    ]
    gains = [sign * (ours - theirs) for ours, theirs in pairs]
    wins, gain = sum(one > 0 for one in gains), fmean(gains) if gains else 0.0
    means = f"{metric} {fmean(row.mean.values):.3f} with {row.label} against {fmean(other.mean.values):.3f}"
    counted = f"better in {wins} of {len(gains)} trainings"
    verb = ahead if gain > 0 or not behind else behind
    return f"{verb}: {means} with {other.label}, {counted}."
