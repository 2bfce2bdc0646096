"""The structure of a run's ``results.json``: checked where it is read, and relied on everywhere else."""

from __future__ import annotations

from typing import Any

from medfedaug.federation.job_folder import LEVELS
from medfedaug.metrics.registry import GLOBAL
from medfedaug.utils.structure import (
    anything,
    both,
    count,
    entries,
    list_of,
    map_of,
    number,
    optional,
    plain,
    row_of,
    score,
    text,
)

__all__ = ["check_evaluation", "check_finished", "check_record"]


def check_record(record: Any) -> None:
    """Check that a record has the structure that this release writes; entries that it does not know pass.

    Raises:
        ValueError: naming the first entry that is of another kind, such as ``test.mean.dice``.

    Example:
        >>> check_record({"selected_round": "one"})
        Traceback (most recent call last):
        ValueError: selected_round is 'one', and a whole number from 0 on was expected
    """
    _RECORD(record, "")


def check_finished(record: Any) -> None:
    """Check that a record has the structure of a finished run's, and all that is shown of one.

    Raises:
        ValueError: naming the first entry that is missing or of another kind.
    """
    check_record(record)
    entries({"test": entries({}, needed=("sites", "mean"))}, needed=("config", "selected_round", "test"))(
        record, ""
    )


def check_evaluation(content: Any) -> None:
    """Check that the results of an evaluation have the structure that this release writes.

    Raises:
        ValueError: naming the first entry that is of another kind, or a model that is not among the models.
    """
    _EVALUATION(content, "")
    for site, scores in content["sites"].items():
        for model in scores:
            if model not in content["models"]:
                raise ValueError(
                    f"sites.{site} has the scores of a model '{model}', which models does not name"
                )


_TROUBLE = list_of(entries({"site": text, "reason": text, "task": text}))
_BYTES = map_of(map_of(count))
_DESCRIPTION = entries({"scanners": map_of(list_of(text)), "years": list_of(count)})
_ROUND = entries(
    {
        "round": count,
        "sites": map_of(map_of(plain)),
        "bytes_up": count,
        "bytes_down": count,
        "bytes": _BYTES,
        "methods": map_of(map_of(anything)),
        "refused": _TROUBLE,
        "missing": _TROUBLE,
        "shares": map_of(number),
        "steps": map_of(map_of(number)),
        "suspected": _TROUBLE,
        "seconds": number,
        "hours": number,
    },
)
_SCORES = entries(
    {
        "cases": map_of(score),
        "case_metrics": map_of(map_of(score)),
        "case_classes": map_of(map_of(score)),
        "classes": map_of(map_of(score)),
        "patients": map_of(count),
        "scored_cases": count,
        "missed": count,
        "undivided": count,
        "note": text,
        "unit": text,
    },
    score,
)
_WORST = entries({"site": text, "value": number}, needed=("site", "value"))
_TEST = entries(
    {
        "sites": map_of(_SCORES),
        "unseen": map_of(_SCORES),
        "mean": map_of(score),
        "worst": map_of(optional(_WORST)),
        "missing": map_of(text),
    }
)
_FINGERPRINT = entries(
    {"spacing": row_of(row_of(number, 3), 3), "intensity": list_of(row_of(number, 2))},
    needed=("spacing", "intensity"),
)
_RECORD = entries(
    {
        "config": entries(
            {"methods": list_of(entries({"name": text, "args": map_of(anything)})), "holdout": list_of(text)}
        ),
        "run": text,
        "rounds": list_of(_ROUND),
        "selected_round": count,
        "stalled": entries({"round": count, "reason": text}, needed=("round", "reason")),
        "sites": map_of(count),
        "unseen": list_of(text),
        "left_out": map_of(text),
        "scored": map_of(text),
        "shares": map_of(map_of(number)),
        "labelled": map_of(list_of(text)),
        "descriptions": map_of(_DESCRIPTION),
        "versions": map_of(text),
        "input": map_of(anything),
        "execution": map_of(anything),
        "bytes_up_before_training": map_of(count),
        "sha256": map_of(text),
        "files": map_of(anything),
        "metrics": map_of(anything),
        "test": _TEST,
        "seconds": number,
        "engine": text,
        "data": text,
        "data_options": map_of(anything),
        "planned": entries({"fingerprints": map_of(_FINGERPRINT)}),
        "spacing": map_of(entries(dict.fromkeys(LEVELS, row_of(number, 3)), needed=LEVELS)),
        "init": map_of(anything),
    }
)
_DIFFERENCE = entries({"patients": count, "cases": count}, score)
_COMPARED = both(
    entries({"against": map_of(_DIFFERENCE)}),
    lambda value, where: _SCORES({k: v for k, v in value.items() if k != "against"}, where),
)
_MODEL = entries(
    {"scored": text, "methods": list_of(text), "runs": list_of(entries({"run": text}))}, needed=("scored",)
)
_EVALUATION = entries(
    {
        "metric": text,
        "metrics": map_of(map_of(plain)),
        "models": both(map_of(_MODEL), entries({}, needed=(GLOBAL,))),
        "unseen": list_of(text),
        "sites": map_of(map_of(_COMPARED)),
        "mean": map_of(map_of(score)),
        "missing": map_of(map_of(text)),
        "cross_site": map_of(map_of(map_of(_COMPARED))),
        "kept": map_of(map_of(text)),
    },
    needed=("metric", "models", "sites"),
)
