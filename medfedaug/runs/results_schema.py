"""The structure of a run's ``results.json``, checked wherever one is read."""

from typing import Any

from medfedaug.federation.job_folder import LEVELS
from medfedaug.metrics.registry import GLOBAL
from medfedaug.utils.structure import (
    anything,
    both,
    count,
    entries,
    kind,
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
    """Check that a record has the structure of this release; unknown entries pass.

    Raises:
        ValueError: naming the first entry of another kind, such as ``test.mean.dice``.

    Example:
        >>> check_record({"selected_round": "one"})
        Traceback (most recent call last):
        ValueError: selected_round is 'one', expected a whole number from 0 on
    """
    _RECORD(record, "")


def check_finished(record: Any) -> None:
    """Check that a record has all entries of a finished run."""
    _FINISHED(record, "")
    check_record(record)


def check_evaluation(content: Any) -> None:
    """Check that the results of an evaluation have the structure of this release."""
    _EVALUATION(content, "")
    for site, scores in content["sites"].items():
        for model in scores:
            if model not in content["models"]:
                raise ValueError(f"sites.{site} has scores of a model '{model}', which models does not name")


_TROUBLE = list_of(entries({"site": text, "reason": text, "task": text}))
_ROUND = entries(
    {
        **dict.fromkeys(("round", "bytes_up", "bytes_down"), count),
        **dict.fromkeys(("refused", "missing"), _TROUBLE),
        **dict.fromkeys(("seconds", "hours"), number),
        "sites": map_of(map_of(plain)),
        "bytes": map_of(map_of(count)),
        "methods": map_of(map_of(anything)),
        "shares": map_of(number),
        "cosines": map_of(number),
    }
)
_SCORES = entries(
    {
        "cases": map_of(score),
        **dict.fromkeys(("case_metrics", "case_classes", "classes"), map_of(map_of(score))),
        "patients": map_of(count),
        **dict.fromkeys(("scored_cases", "missed", "undivided"), count),
        **dict.fromkeys(("note", "unit"), text),
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
            {
                "methods": list_of(entries({"name": text, "args": map_of(anything)})),
                "holdout": list_of(text),
                "plan": map_of(anything),
                "seed": kind("a whole number", lambda value: type(value) is int),
            }
        ),
        **dict.fromkeys(("run", "job", "date", "engine", "data"), text),
        **dict.fromkeys(("left_out", "suspected", "scored", "versions", "sha256"), map_of(text)),
        **dict.fromkeys(("sites", "bytes_up_before_training"), map_of(count)),
        **dict.fromkeys(("input", "execution", "files", "metrics", "data_options", "init"), map_of(anything)),
        "rounds": list_of(_ROUND),
        "selected_round": count,
        "stalled": entries({"round": count, "reason": text}, needed=("round", "reason")),
        "unseen": list_of(text),
        "shares": map_of(map_of(number)),
        "labelled": map_of(list_of(text)),
        "counts": map_of(map_of(count)),
        "test": _TEST,
        "seconds": number,
        "planned": entries({"fingerprints": map_of(_FINGERPRINT), "asked": map_of(anything)}),
        "spacing": map_of(entries(dict.fromkeys(LEVELS, row_of(number, 3)), needed=LEVELS)),
    }
)
_FINISHED = entries(
    {
        "config": entries({"methods": list_of(entries({}, needed=("name",)))}, needed=("methods", "seed")),
        "rounds": list_of(entries({}, needed=("round", "sites"))),
        "test": entries({}, needed=("sites", "mean")),
        "planned": entries({}, needed=("asked",)),
    },
    needed=("config", "input", "rounds", "selected_round", "test"),
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
    },
    needed=("metric", "models", "sites"),
)
