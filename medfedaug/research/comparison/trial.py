"""A small trial on a user's own data: suggested methods, and recommendations from their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from medfedaug.analysis.score_table import Row, Table
from medfedaug.analysis.text_table import TextTable
from medfedaug.data.base import SiteFolder
from medfedaug.metrics.nothing_learned import nothing_learned_at
from medfedaug.metrics.registry import find_metric
from medfedaug.runs.run import BASELINE

ALONE = "single"
_REMEDIES = ("fedrdn", "fedbn", "ditto")
_CAUSES = "a remedy for each cause of differences: intensities, features, and what sites cannot share"
_LACKING = "condist"
WITHOUT_OUTLINES = ("condist", "teacher")
"""Methods that learn from sites without outlines."""
_STAY = "Stay alone, as it looks now"
_MOST_SITES = 6


@dataclass(frozen=True)
class Suggestion:
    """Methods to try on the data of a federation.

    Args:
        methods: further methods than training alone and plain averaging.
        reason: one sentence.
    """

    methods: tuple[str, ...]
    reason: str


def suggest(sites: Sequence[SiteFolder]) -> Suggestion:
    """Suggest methods for sites."""
    if any(site.partial for site in sites):
        reason = f"{_CAUSES}; {_LACKING} teaches sites the classes that others have annotated"
        return Suggestion((*_REMEDIES, _LACKING), reason)
    return Suggestion(_REMEDIES, _CAUSES)


def recommend(scores: Table, rising: int | None = None) -> list[str]:
    """Recommend the next steps from the scores of a trial, each with its evidence.

    Args:
        scores: with a row for `single`, for `fedavg` and for each tried method.
        rising: the number of rounds after which FedAvg's validation score still rose; ``None`` if it did not.

    Returns:
        Sentences: together or alone, the method to use, the sites where it gains, and the next evidence.
    """
    if scores.nothing_learned:
        return [f"Nothing was learned, and nothing follows: {scores.nothing_learned}."]
    if scores.untrained:
        return [f"No recommendation. {scores.untrained}"]
    if rising is not None:
        return [
            f"No recommendation: after {rising} rounds the validation score of {BASELINE} still rose, and "
            f"methods that learn faster look better than they are. Train longer: --rounds {2 * rising}."
        ]
    rows = {row.label: row for row in scores.rows if row.mean.mean is not None}
    sentences, metric = [], find_metric(scores.metric)
    sign = 1 if metric.higher_is_better else -1
    together = {label: row for label, row in rows.items() if label != ALONE}
    if not together:
        return [f"No run of a federation has a {metric.in_text}."]
    best = max(together.values(), key=lambda row: sign * fmean(row.mean.values))
    if ALONE in rows:
        sentences.append(_compared(best, rows[ALONE], sign, "Train together", _STAY, metric.in_text))
    stay = any(sentence.startswith(_STAY) for sentence in sentences)
    take = "To train together all the same, take" if stay else "Go on with"
    if best.label != BASELINE and BASELINE in rows:
        sentences.append(_compared(best, rows[BASELINE], sign, f"{take} {best.label}", "", metric.in_text))
        sentences += _by_site(rows, sign, metric.in_text)
    elif BASELINE in rows:
        sentences.append(f"{take} {BASELINE}: no other method that was tried scored above it.")
    sentences += _at_nothing(rows, scores.metric)
    trainings = len(best.seeds)
    sentences.append(
        f"That rests on {trainings} training{'s' * (trainings > 1)} of a few rounds, and is no verdict: "
        "`medfedaug benchmark` with five seeds, folds and the rounds that you need gives one."
    )
    return sentences


def _at_nothing(rows: Mapping[str, Row], metric: str) -> list[str]:
    """Name the sites at which methods learned nothing."""
    at: dict[str, list[str]] = {}
    for label, row in rows.items():
        for site in nothing_learned_at(metric, {site: score.mean for site, score in row.sites.items()}):
            at.setdefault(site, []).append(label)
    return [
        f"Nothing was learned at {site} with {', '.join(labels)}: {find_metric(metric).in_text} 0.000."
        for site, labels in at.items()
    ]


def taken_in(scores: TextTable | None, without: Table, names: Sequence[str]) -> list[str]:
    """Compare trainings with and without sites that have no outlines, by the scores of the other sites.

    Returns:
        A sentence; none without scores of the others.
    """
    others = [site for site in without.sites if site not in names]
    if not isinstance(scores, Table) or not others:
        return []
    means = [
        {
            row.label: fmean(known)
            for row in table.rows
            if len(known := [mean for site in others if (mean := row.sites[site].mean) is not None])
            == len(others)
        }
        for table in (scores, without)
    ]
    if not all(means):
        return []
    metric = find_metric(scores.metric)
    best = [(max if metric.higher_is_better else min)(table, key=table.__getitem__) for table in means]
    return [
        f"With the images of {', '.join(names)}, which has no outlines: {metric.in_text} "
        f"{means[0][best[0]]:.3f} with {best[0]} at the other sites, against {means[1][best[1]]:.3f} with "
        f"{best[1]} without them."
    ]


def _by_site(rows: Mapping[str, Row], sign: int, metric: str) -> list[str]:
    """Name the best method of each site, and its lead over plain averaging."""
    sentences = []
    for site, score in rows[BASELINE].sites.items():
        means = {label: row.sites[site].mean for label, row in rows.items() if site in row.sites}
        known = {label: mean for label, mean in means.items() if mean is not None}
        if score.mean is not None and known:
            best = max(known, key=lambda label: sign * known[label])
            sentences.append(f"{site} {best} ({known[best] - score.mean:+.3f})")
    if not sentences or len(sentences) > _MOST_SITES:
        return []
    return [f"Best by site, with its {metric} minus that of {BASELINE}: {', '.join(sentences)}."]


def _compared(row: Row, other: Row, sign: int, ahead: str, behind: str, metric: str) -> str:
    by_seed = dict(zip(other.seeds, other.mean.values, strict=False))
    scores = zip(row.seeds, row.mean.values, strict=False)
    gains = [sign * (score - by_seed[seed]) for seed, score in scores if seed in by_seed]
    wins, gain = sum(value > 0 for value in gains), fmean(gains) if gains else 0.0
    means = f"{metric} {fmean(row.mean.values):.3f} with {row.label} against {fmean(other.mean.values):.3f}"
    counted = f"better in {wins} of {len(gains)} trainings"
    verb = ahead if gain > 0 or not behind else behind
    return f"{verb}: {means} with {other.label}, {counted}{_carried(row, other)}."


def _carried(row: Row, other: Row) -> str:
    """Name the sites without which the mean difference of the others is 0 or has the other sign."""
    means = {
        site: (score.mean, other.sites[site].mean) for site, score in row.sites.items() if site in other.sites
    }
    gains = {site: a - b for site, (a, b) in means.items() if a is not None and b is not None}
    whole, carried = sum(gains.values()), ""
    for site, gain in gains.items() if len(gains) > 1 and whole else ():
        if (whole - gain) * whole <= 0:
            carried += f", by {site} alone (elsewhere {(whole - gain) / (len(gains) - 1):+.3f})"
    return carried
