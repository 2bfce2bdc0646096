"""The structure of the events in ``events.jsonl``, which their reader checks and others rely on."""

from collections.abc import Mapping
from typing import Any

from medfedaug.utils.structure import (
    Check,
    anything,
    count,
    count_to,
    entries,
    list_of,
    map_of,
    number,
    number_from_to,
    pairs_of,
    text,
)

# Each has a place in a drawing and a gap in a line of characters.
_round = count_to(1_000_000)
_seconds = number_from_to(0, 1e12)
_ROUND, _SITE, _REASON = {"round": _round}, {"site": text}, {"reason": text}
_SIZES = entries({"up": count, "down": count}, needed=("up", "down"))


def _all(known: Mapping[str, Check], also: Mapping[str, Check] | None = None) -> Check:
    """Accept an object with all of the first entries, and optionally the others."""
    return entries({**known, **(also or {})}, needed=tuple(known))


def _any_score(value: Any, where: str) -> None:
    """Accept the score of a round's model below ``val_`` and the name of a metric."""
    entries({**_ROUND, **{key: number for key in value if key.startswith("val_")}}, needed=("round",))(
        value, where
    )


EVENTS: Mapping[str, Check] = {
    "answered": _all(
        {
            **_ROUND,
            "rounds": _round,
            "task": text,
            "scores": map_of(number),
            "samples": count,
            "seconds": _seconds,
            "model": count,
            "statistics": map_of(count),
        },
        {"cases": count, "unscored": text},
    ),
    "away": _all({**_SITE, "seconds": _seconds}),
    "constant_channels": _all({**_SITE, "channels": anything}),
    "ended": _all({}),
    "failed": _all({"message": text}),
    "finished": _all({}),
    "init": _all({"loaded": count, "of": count, "file": text, "skipped": map_of(text)}),
    "labelled": _all({**_SITE, "classes": text}),
    "left_out": _all(_REASON),
    "missing": _all({**_ROUND, **_REASON, "task": text}),
    "missing_channels": _all({**_SITE, "channels": anything}),
    "not_answered": _all({**_REASON, "task": text}),
    "planned": _all({"reasons": pairs_of(text)}),
    "prepared": _all({**_SITE, "samples": count}),
    "refused": _all({**_ROUND, **_REASON}),
    "resumed": _all(_ROUND),
    "returned": _all(_SITE),
    "round_finished": _all({**_ROUND, "seconds": _seconds}, {"samples": count, "bytes": map_of(_SIZES)}),
    "round_started": _all(_ROUND, {"rounds": _round}),
    "stalled": _all({**_ROUND, **_REASON}),
    "share_lowered": _all({**_SITE, "after": number, "before": number}),
    "stage": _all({"text": text}),
    "step_shortened": _all({**_ROUND, **_SITE, "parameters": number, "buffers": number, "cosine": number}),
    "suspected": _all({**_ROUND, **_SITE, **_REASON}),
    "tested": _all(_SITE),
    "trained": _all({**_ROUND, **_SITE}),
    "uneven": _all(_REASON),
    "unscored": _all({**_SITE, **_REASON}),
    "unseen": _all(_SITE),
    "validated": _any_score,
    "waiting": _all({"sites": list_of(text), "answers": count, "needed": count}),
    "warning": _all({"text": text}),
}
"""Check of each kind of event that has a line or a place on a page; others pass."""


def check_event(event: Mapping[str, Any]) -> None:
    """Check that an event has the structure that this release writes.

    Example:
        >>> check_event({"event": "resumed", "round": "three"})
        Traceback (most recent call last):
        ValueError: round is 'three', and a whole number from 0 to 1000000 was expected
    """
    kind = event["event"]
    text(kind, "event")
    EVENTS.get(kind, anything)(event, "")
