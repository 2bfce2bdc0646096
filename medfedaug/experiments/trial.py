"""A small trial on a user's own data: which methods to try, and what their scores recommend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from medfedaug.analysis.inspection_page import foreign_sites
from medfedaug.analysis.prospect import Prospect
from medfedaug.analysis.score_table import Row, Table
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


def suggest(found: Sequence[SiteInspection], prospect: Prospect | None) -> Suggestion:
    """Suggest a method for sites like these.

    Suggested is the method that is expected to gain most, where its 80% interval lies above 0 and such
    predictions have skill; *norm* where there is none, and where the sites' images are foreign to each other.

    Args:
        found: of `medfedaug.data.quality.inspection.inspect_sites`.
        prospect: what is predicted; ``None`` where the sites cannot be compared.
    """
    if foreign_sites(found):
        reason = "images lie far from 0 under other sites' statistics, where fedrdn fell below norm"
        return Suggestion((_CHEAPEST,), reason)
    remedy = BASELINE if prospect is None else prospect.remedy
    if prospect is None or remedy == BASELINE or not prospect.has_skill(remedy):
        return Suggestion((_CHEAPEST,), "no method is surely expected to gain, and norm costs least")
    gain = prospect.gains["mean"][remedy][""]
    assert gain.interval80 is not None
    low, high = gain.interval80
    return Suggestion(
        (remedy,), f"expected gain over fedavg {gain.mean:+.3f} (80%: {low:+.3f} to {high:+.3f})"
    )


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
