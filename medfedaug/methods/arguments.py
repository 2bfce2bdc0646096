"""Checks that arguments have the types of their annotations."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from medfedaug.errors import ConfigError

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    NoneType: "null",
}


def check_arguments(name: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Check arguments from a command line or a job, where the text ``no`` would count as true.

    Annotations made of bool, int, float, str, None, literals and sequences of these are checked; what has
    another one is left to ``factory``.

    Args:
        name: what the arguments are for, as a user writes it.
        factory: what is called with them.
        args: the arguments by name.

    Example:
        >>> def method(prob: float = 0.5, stages: Sequence[int | str] | None = None): ...
        >>> check_arguments("method", method, {"prob": 1, "stages": [1, "last"]})
        >>> check_arguments("method", method, {"prob": "often"})
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: method.prob is 'often', and a finite number is needed
    """
    try:
        parameters = inspect.signature(factory, eval_str=True).parameters
    except (NameError, TypeError, ValueError, AttributeError):  # annotations that mean nothing at run time
        return
    for argument, value in args.items():
        annotation = parameters[argument].annotation if argument in parameters else inspect.Parameter.empty
        if not _fits(value, annotation):
            raise ConfigError(f"{name}.{argument} is {value!r}, and {_words(annotation)} is needed")


def _fits(value: Any, annotation: Any) -> bool:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if origin is Sequence or origin in (list, tuple):
        kind = inner[0] if inner else Any
        return isinstance(value, list | tuple) and all(_fits(one, kind) for one in value)
    if annotation in (int, float):
        number = isinstance(value, Integral if annotation is int else Real) and not isinstance(value, bool)
        return number and abs(value) <= sys.float_info.max
    if annotation in (None, *_WORDS):
        return isinstance(value, annotation or NoneType)
    return True


def _words(annotation: Any) -> str:
    inner = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_words, inner))
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if inner:
        return (
            f"a list, each {_words(inner[0])}," if not get_args(inner[0]) else f"a list of {_words(inner[0])}"
        )
    return _WORDS.get(annotation, "another value")
