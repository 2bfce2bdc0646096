"""Settings that a sweep varies, as ``--set`` takes them."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from medfedaug.errors import ConfigError
from medfedaug.utils.files import parse_json

_PARTS = 60


@dataclass(frozen=True)
class Axis:
    """A setting (``"METHOD.ARG"``, a field of `RunConfig`, an option of the data) and its values in turn."""

    name: str
    values: tuple[Any, ...]

    @property
    def method(self) -> str:
        """The method that the setting belongs to; empty for the run's and the data's."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Comparison:
    """Combinations of methods, each in all combinations of the settings that apply to it."""

    methods: tuple[str, ...]
    axes: tuple[Axis, ...] = ()

    def __str__(self) -> str:
        """Return methods and settings as the command takes them."""
        settings = " ".join(f"{axis.name}={','.join(map(shown, axis.values))}" for axis in self.axes)
        return f"--methods {' '.join(self.methods)}" + (f" --set {settings}" if settings else "")


def parse_axis(text: str) -> Axis:
    """Parse an axis, such as ``"fedfa.prob=0.1,0.5"``; commas inside brackets do not separate values.

    Example:
        >>> parse_axis("fedfa.stages=[1],[1,2]").values
        ([1], [1, 2])
        >>> parse_axis("fraction=1/2,1").values
        (0.5, 1)
    """
    name, equals, parts = text.partition("=")
    values = tuple(map(axis_value, split_values(parts)))
    if not (equals and name) or "" in values:
        raise ConfigError(f"--set {text!r}: write NAME=VALUE or NAME=VALUE,VALUE,...")
    return Axis(name.strip(), values)


def split_values(text: str) -> Iterator[str]:
    """Yield the parts between commas; commas inside brackets do not separate."""
    depth, part = 0, ""
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += character
    yield part.strip()


def axis_value(text: Any) -> Any:
    """Read the value of a setting: a share such as ``1/6``, JSON, or other text.

    >>> axis_value("1/4"), axis_value("1e-3"), axis_value("sgd"), axis_value([1, 2])
    (0.25, 0.001, 'sgd', [1, 2])
    """
    if not isinstance(text, str):
        return text
    if re.fullmatch(r"\d+/\d+", text):
        return float(Fraction(text))
    with suppress(ValueError):
        return parse_json(text)
    return text


def shown(value: Any) -> str:
    """Format a value for the name of a run, different from other values.

    A number has four digits if it has no more or is a share such as 1/6, and else all its digits.

    >>> shown(0.1), shown(1 / 6), shown(0.00123456)
    ('0.1', '0.1667', '0.00123456')
    """
    if isinstance(value, float):
        short = f"{value:.4g}"
        # Shares of at most 60 parts differ in their first four digits.
        share = 0 < value < 1 and float(Fraction(value).limit_denominator(_PARTS)) == value
        return short if share or float(short) == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
