"""Checks of values from users and files, with one message for each kind of mistake."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from medfedaug.errors import ConfigError

__all__ = ["check_choice", "check_keys", "is_number", "number_or_none"]


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a finite number; ``true`` is none, nor is one beyond a float's range.

    Example:
        >>> [is_number(value) for value in (1, 0.5, True, "1", float("nan"), 10**400)]
        [True, True, False, False, False, False]
    """
    # Whole numbers in JSON have as many digits as their writer likes, which `math.isfinite` cannot take.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def number_or_none(value: Any) -> float | None:
    """The number, or ``None`` for what is none: a text, NaN, nothing to score."""
    return float(value) if is_number(value) else None


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Check that a value is one of several.

    Raises:
        ConfigError: naming the value and the choices.

    Example:
        >>> check_choice("split", "random", ("patient", "published"))
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: split 'random' is not known; choose from patient, published
    """
    choices = tuple(choices)
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is not known; choose from {', '.join(choices)}")


def check_keys(unknown: str, keys: Iterable[Any], known: Iterable[str]) -> None:
    """Check that there is no unknown key, which would silently do nothing.

    Args:
        unknown: the beginning of the message.
        keys: those that are there.
        known: those that may be.

    Raises:
        ConfigError: naming the unknown keys, and the known ones.

    Example:
        >>> check_keys("privacy: unknown settings", {"min_image": 5}, ("min_images", "delta"))
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: privacy: unknown settings min_image; known: min_images, delta
    """
    known = tuple(known)
    extra = sorted(map(str, set(keys) - set(known)))
    if extra:
        raise ConfigError(f"{unknown} {', '.join(extra)}; known: {', '.join(known)}")
