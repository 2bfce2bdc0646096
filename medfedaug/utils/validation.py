"""Checks of values from users and files, with one message for each kind of mistake."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from medfedaug.errors import ConfigError
from medfedaug.utils.printable import printable

_LONGEST = 1_000


def is_number(value: Any) -> bool:
    """Return whether a value from JSON is a finite number within a float's range; ``true`` is not.

    Example:
        >>> [is_number(value) for value in (1, 0.5, True, "1", float("nan"), 10**400)]
        [True, True, False, False, False, False]
    """
    # Whole numbers in JSON have as many digits as their writer likes, which `math.isfinite` cannot take.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def number_or_none(value: Any) -> float | None:
    """Return the number, or ``None`` for another value, such as NaN or a text."""
    return float(value) if is_number(value) else None


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names for a message.

    Example:
        >>> first_of("abc"), first_of("abcd")
        ('a, b, c', 'a, b, c, ...')
    """
    return ", ".join([*names[:most], *(["..."] if len(names) > most else [])])


def not_known(name: Any, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: similar names, or all names.

    Names of the same letters come first, then names that contain the name, then names that look like it.

    Example:
        >>> not_known("fedrnd", ("fedavg", "fedrdn", "fedfa"))
        'is not known; did you mean fedrdn? All: fedavg, fedrdn, fedfa'
        >>> not_known("random", ("patient", "published"))
        'is not known; choose from patient, published'
    """
    choices, text = tuple(choices), str(name).lower()
    near = [choice for choice in choices if text and sorted(choice.lower()) == sorted(text)]
    near = near or [choice for choice in choices if text and text in choice.lower()]
    near = near or get_close_matches(text, choices)
    meant = f"did you mean {' or '.join(near)}? All: " if near else "choose from "
    return f"is not known; {meant}{', '.join(choices)}"


def split_names(what: str, text: str) -> list[str]:
    """Return the names in a text, which commas separate.

    Example:
        >>> split_names("methods", "fedrdn, fedfa")
        ['fedrdn', 'fedfa']
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if spaced := next((name for name in names if len(name.split()) > 1), ""):
        raise ConfigError(f"{what} {spaced!r}: commas separate them, as in {','.join(spaced.split())}")
    return names


def named_pairs(
    option: str, example: str, given: Iterable[str], *, form: str = "NAME=VALUE", first: bool = False
) -> dict[str, str]:
    """Read values such as ``NAME=VALUE`` with different names, without the spaces around either.

    Args:
        first: splits at the first sign, since a value may have some; by default at the last one.

    Example:
        >>> named_pairs("--segments", "'Tumour core=tumour'", ["Tumour core = tumour"])
        {'Tumour core': 'tumour'}
    """
    split = [text.partition("=") if first else text.rpartition("=") for text in given]
    pairs = [(name.strip(), value.strip()) for name, _, value in split]
    names, wanted = [name for name, _ in pairs], f"takes {form}, such as {example}"
    twice = next((f"names {name} twice" for name in names if names.count(name) > 1), "")
    if problem := twice if all(map(all, pairs)) else wanted:
        raise ConfigError(f"{option} {problem}")
    return dict(pairs)


def match_case(name: str, known: Iterable[str]) -> str:
    """Return the known name that differs from a name only in capitals; an unknown name stays as it is.

    Example:
        >>> match_case("FedAvg", ("fedavg", "fedrdn")), match_case("lora", ("fedavg",))
        ('fedavg', 'lora')
    """
    same = [other for other in known if other.lower() == name.lower()]
    return name if name in same else (same or [name])[0]


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Check that a value is one of several.

    Example:
        >>> check_choice("split", "random", ("patient", "published"))
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: split 'random' is not known; choose from patient, published
    """
    choices = tuple(choices)
    if value not in choices:
        raise ConfigError(f"{name} {value!r} {not_known(value, choices)}")


def check_keys(unknown: str, keys: Iterable[Any], known: Iterable[str]) -> None:
    """Check that there is no unknown key, which would silently do nothing.

    Example:
        >>> check_keys("jobs: unknown", {"aprove": True}, ("approve", "loops"))
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: jobs: unknown aprove (did you mean approve?); known: approve, loops
    """
    known = tuple(known)
    extra = sorted(map(str, set(keys) - set(known)))
    if extra:
        hints = [
            f"{key} (did you mean {near[0]}?)" if (near := get_close_matches(key, known, 1)) else key
            for key in extra
        ]
        raise ConfigError(f"{unknown} {', '.join(hints)}; known: {', '.join(known) or 'none'}")


def check_plain(name: str, value: Any, depth: int = 100) -> None:
    r"""Check that a setting from JSON has short texts of visible characters, finite numbers and few levels.

    The message has the name only, and repeats no text of others.

    Example:
        >>> check_plain("classes", ("background", "lesion\x1b[2J"))
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: classes: holds a control character or one that cannot be seen; remove it
    """
    problem = ""
    if isinstance(value, str) and printable(value) != value:
        problem = ": holds a control character or one that cannot be seen; remove it"
    elif isinstance(value, str) and len(value) > _LONGEST:
        problem = f": holds a text of more than {_LONGEST} characters; shorten it"
    elif isinstance(value, float) and not math.isfinite(value):
        problem = " must be a finite number"
    elif not depth:
        problem = ": nested too deeply"
    if problem:
        raise ConfigError(f"{name}{problem}")
    if isinstance(value, Mapping | list | tuple):
        for entry in [*value, *value.values()] if isinstance(value, Mapping) else value:
            check_plain(name, entry, depth - 1)
