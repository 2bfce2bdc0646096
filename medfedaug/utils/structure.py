"""Checks of JSON from outside, which compose to checks of a structure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from medfedaug.utils.validation import is_number

Check = Callable[[Any, str], None]
"""Called with a value and its place, such as ``test.mean.dice``; raises `ValueError` naming both."""


def fail(value: Any, where: str, expected: str) -> NoReturn:
    """Refuse a value."""
    # Python writes no integer of thousands of digits.
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    text = text if len(text) <= 40 else f"{text[:37]}..."
    raise ValueError(f"{where or 'the content'} is {text}, expected {expected}")


def kind(expected: str, accepts: Callable[[Any], bool]) -> Check:
    """Accept values of a kind; ``expected`` names it."""

    def checked(value: Any, where: str) -> None:
        if not accepts(value):
            fail(value, where, expected)

    return checked


text = kind("a text", lambda value: isinstance(value, str))
number = kind("a finite number", is_number)
score = kind("a finite number or null", lambda value: value is None or is_number(value))
count = kind("a whole number from 0 on", lambda value: type(value) is int and 0 <= value < 2**63)


def one_of(choices: Sequence[str]) -> Check:
    """Accept one of some texts."""
    return kind(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


def plain(value: Any, where: str) -> None:
    """Accept a number, a text or null, and an object of such values."""
    if isinstance(value, Mapping):
        map_of(plain)(value, where)
    elif not isinstance(value, str | bool):
        score(value, where)


def anything(value: Any, where: str) -> None:
    """Accept all values."""


def finite(value: Any, where: str) -> None:
    """Accept all JSON but NaN and infinity, which Python's reader takes too."""
    if isinstance(value, Mapping):
        map_of(finite)(value, where)
    elif isinstance(value, list):
        list_of(finite)(value, where)
    elif isinstance(value, float):
        number(value, where)


def both(*checks: Check) -> Check:
    """Accept values that several checks accept."""

    def checked(value: Any, where: str) -> None:
        for check in checks:
            check(value, where)

    return checked


def optional(check: Check) -> Check:
    """Accept null as well."""
    return lambda value, where: None if value is None else check(value, where)


def map_of(check: Check) -> Check:
    """Accept an object with entries of one kind, under any names."""
    return entries({}, check)


def list_of(check: Check) -> Check:
    """Accept a list with entries of one kind."""

    def checked(value: Any, where: str) -> None:
        if not isinstance(value, list):
            fail(value, where, "a list")
        for index, entry in enumerate(value):
            check(entry, f"{where}[{index}]")

    return checked


def row_of(check: Check, length: int) -> Check:
    """Accept a list of so many entries of one kind."""

    def checked(value: Any, where: str) -> None:
        list_of(check)(value, where)
        if len(value) != length:
            fail(value, where, f"a list of {length}")

    return checked


def entries(known: Mapping[str, Check], other: Check = anything, needed: Sequence[str] = ()) -> Check:
    """Accept an object whose known entries, if present, are each of their own kind."""

    def checked(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            fail(value, where, "an object")
        for key, entry in value.items():
            known.get(key, other)(entry, f"{where}.{key}" if where else str(key))
        for key in needed:
            if key not in value:
                fail(value, where, f"an object with {key}")

    return checked
