"""Settings that are dataclass fields with a text of their own.

The text is written once: `documented` puts it into the docstring of the dataclass, and the command makes an
option of the field (`medfedaug.cli.options`).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from medfedaug.errors import ConfigError
from medfedaug.utils.validation import check_choice, check_printable

__all__ = ["check_fields", "documented", "setting"]

Class = TypeVar("Class", bound=type)

_WIDTH = 106
_LARGEST_NUMBER, _LARGEST_COUNT = 1e15, 2**63 - 1
# By annotation; `true` is a whole number to Python and to nobody else.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "text"),
    "str | None": ((str, type(None)), "text or null"),
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "int | None": ((int, type(None)), "a whole number or null"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number or null"),
    "dict[str, Any]": ((dict,), "a JSON object"),
    "tuple[str, ...] | None": ((tuple, type(None)), "a list of texts or null"),
    "tuple[int, ...] | None": ((tuple, type(None)), "a list of whole numbers or null"),
    "tuple[float, ...] | None": ((tuple, type(None)), "a list of numbers or null"),
}


def setting(
    default: Any,
    text: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: Sequence[str] = (),
    flags: Sequence[str] | None = (),
) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: the default value, or a type that makes it, such as ``dict``.
        text: what the setting is, in plain text: for the documentation and for the command's help.
        above: values must be greater.
        at_least: values must not be less.
        at_most: values must not be more; no number may be beyond what 64 bits hold, or 1e15 with a fraction.
        choices: the values that it may have.
        flags: names of the command's option, if not that of the field; ``None`` for no option.
    """
    metadata = {
        "text": text,
        "above": above,
        "at_least": at_least,
        "at_most": at_most,
        "choices": choices,
        "flags": flags,
    }
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def documented(cls: Class) -> Class:
    """Put the fields' texts into the docstring of a dataclass, as its ``Args``, before ``Raises``.

    Example:
        >>> @documented
        ... @dataclasses.dataclass
        ... class Size:
        ...     '''The size of a room.'''
        ...     width: float = setting(1.0, "Width in metres.")
        >>> print(Size.__doc__)
        The size of a room.
        <BLANKLINE>
        Args:
            width: Width in metres.
    """
    texts = [
        textwrap.fill(f"{entry.name}: {entry.metadata['text']}", _WIDTH, subsequent_indent="    ")
        for entry in dataclasses.fields(cls)
    ]
    before, raises, after = inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:")
    cls.__doc__ = f"{before}\n\nArgs:\n{textwrap.indent(chr(10).join(texts), '    ')}{raises}{after}"
    return cls


def check_fields(settings: Any) -> None:
    """Check the type of every field, that its texts are printable, and what `setting` says of its values.

    Args:
        settings: an object of a dataclass.

    Raises:
        ConfigError: naming the field and its value.

    Example:
        >>> @dataclasses.dataclass
        ... class Room:
        ...     width: float = setting(1.0, "Width in metres.", above=0)
        >>> check_fields(Room(width=-1.0))
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: width must be positive, got -1.0
    """
    for entry in dataclasses.fields(settings):
        check_printable(entry.name, getattr(settings, entry.name))  # first: others repeat the value
    for entry in dataclasses.fields(settings):
        value, (kinds, needed) = getattr(settings, entry.name), _KINDS.get(str(entry.type), ((object,), ""))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds and needed):
            raise ConfigError(f"{entry.name} must be {needed}, got {value!r}")
    for entry in dataclasses.fields(settings):
        value, rules = getattr(settings, entry.name), entry.metadata
        if rules.get("choices"):
            check_choice(entry.name, value, rules["choices"])
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{entry.name} must be a finite number, got {value}")
        if isinstance(value, dict) and (wrong := _not_finite(value)):
            raise ConfigError(f"{entry.name}: {wrong} must be a finite number")
        most = rules.get("at_most")
        if most is None:
            most = _LARGEST_NUMBER if isinstance(value, float) else _LARGEST_COUNT
        if isinstance(value, int | float) and value > most:
            raise ConfigError(f"{entry.name} must be at most {most:g}, got {_short(value)}")
        above, least = rules.get("above"), rules.get("at_least")
        if above is not None and not value > above:
            raise ConfigError(f"{entry.name} must be {_bound('above', above)}, got {value}")
        if least is not None and not value >= least:
            raise ConfigError(f"{entry.name} {_bound('at_least', least)}, got {value}")


def _short(value: float) -> str:
    """A number, of which one of hundreds of digits is no part of a line."""
    return f"{value:g}" if abs(value) <= sys.float_info.max else "more than any float"


def _not_finite(values: Any, where: str = "") -> str:
    """Return the place of the first NaN or infinity in a JSON value; empty where there is none."""
    if isinstance(values, float) and not math.isfinite(values):
        return where
    found: Iterable[tuple[Any, Any]] = ()
    if isinstance(values, dict):
        found = values.items()
    elif isinstance(values, list | tuple):
        found = enumerate(values)
    return next((w for key, value in found if (w := _not_finite(value, f"{where}.{key}".lstrip(".")))), "")


def _bound(kind: str, limit: float) -> str:
    if kind == "above":
        return "positive" if limit == 0 else f"above {limit:g}"
    return "cannot be negative" if limit == 0 else f"must be at least {limit:g}"
