"""The structure of a run's ``results.json``: checked where it is read, and relied on everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from medfedaug.utils.validation import is_number

__all__ = ["check_record"]

Check = Callable[[Any, str], None]


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


def _fail(value: Any, where: str, expected: str) -> None:
    # A number of hundreds of digits, or a whole object, is no part of one line.
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    raise ValueError(f"{where or 'the content'} is {shown}, and {expected} was expected")


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        _fail(value, where, "a text")


def _number(value: Any, where: str) -> None:
    if not is_number(value):
        _fail(value, where, "a finite number")


def _score(value: Any, where: str) -> None:
    if value is not None and not is_number(value):
        _fail(value, where, "a finite number or null")


def _count(value: Any, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        _fail(value, where, "a whole number from 0 on")


def _plain(value: Any, where: str) -> None:
    """A number, a text or nothing, or an object of such."""
    if isinstance(value, Mapping):
        _map(_plain)(value, where)
    elif not isinstance(value, str | bool):
        _score(value, where)


def _any(value: Any, where: str) -> None:
    """Whatever it is."""


def _map(check: Check) -> Check:
    def checked(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            _fail(value, where, "an object")
        for key, entry in value.items():
            check(entry, f"{where}.{key}" if where else str(key))

    return checked


def _list(check: Check) -> Check:
    def checked(value: Any, where: str) -> None:
        if not isinstance(value, list):
            _fail(value, where, "a list")
        for index, entry in enumerate(value):
            check(entry, f"{where}[{index}]")

    return checked


def _entries(known: Mapping[str, Check], other: Check = _any, needed: Sequence[str] = ()) -> Check:
    """An object whose known entries are checked each in its own way, where they are there."""

    def checked(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            _fail(value, where, "an object")
        for key, entry in value.items():
            known.get(key, other)(entry, f"{where}.{key}" if where else str(key))
        for key in needed:
            if key not in value:
                _fail(value, where, f"an object with {key}")

    return checked


_TROUBLE = _list(_entries({"site": _text, "reason": _text, "task": _text}))
_BYTES = _map(_map(_count))
_ROUND = _entries(
    {
        "round": _count,
        "sites": _map(_map(_plain)),
        "bytes_up": _count,
        "bytes_down": _count,
        "bytes": _BYTES,
        "methods": _map(_map(_any)),
        "refused": _TROUBLE,
        "missing": _TROUBLE,
        "shares": _map(_number),
        "seconds": _number,
    },
)
_SCORES = _entries(
    {
        "cases": _map(_score),
        "case_metrics": _map(_map(_score)),
        "classes": _map(_map(_score)),
        "patients": _map(_count),
        "scored_cases": _count,
        "missed": _count,
        "note": _text,
        "unit": _text,
    },
    _score,
)
_WORST = _entries({"site": _text, "value": _number}, needed=("site", "value"))
_TEST = _entries(
    {
        "sites": _map(_SCORES),
        "unseen": _map(_SCORES),
        "mean": _map(_score),
        "worst": _map(lambda value, where: None if value is None else _WORST(value, where)),
        "missing": _map(_text),
    }
)
_RECORD = _entries(
    {
        "config": _entries(
            {"methods": _list(_entries({"name": _text, "args": _map(_any)})), "holdout": _list(_text)}
        ),
        "run": _text,
        "rounds": _list(_ROUND),
        "selected_round": _count,
        "sites": _map(_count),
        "unseen": _list(_text),
        "left_out": _map(_text),
        "scored": _map(_text),
        "shares": _map(_map(_number)),
        "versions": _map(_text),
        "input": _map(_any),
        "execution": _map(_any),
        "bytes_up_before_training": _map(_count),
        "sha256": _map(_text),
        "files": _map(_any),
        "metrics": _map(_any),
        "test": _TEST,
        "seconds": _number,
        "engine": _text,
        "data": _text,
        "data_options": _map(_any),
        "planned": _map(_any),
        "init": _map(_any),
    }
)
