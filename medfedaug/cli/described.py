"""`Described`: a method, a network or a data set in words, as ``catalogue.json`` holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("catalogue.json")
BESIDE_THE_MODEL, ONLY_FOR = "sent beside the model", "only for"
"""Headings of the facts of a method."""


@dataclass(frozen=True)
class Argument:
    """An argument of a choice, with its default as JSON; without one a value is needed."""

    name: str
    default: str = ""
    text: str = ""


@dataclass(frozen=True)
class Described:
    """Description of a choice: a method, a network or a data set.

    Args:
        name: the name that a user writes.
        what: its description in one line.
        listed: short facts by heading, for the list of all.
        facts: facts by heading.
        text: further paragraphs.
        arguments: its arguments.
        package: the package that adds it; empty for built-in choices.
    """

    name: str
    what: str = ""
    listed: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    text: tuple[str, ...] = ()
    arguments: tuple[Argument, ...] = ()
    package: str = ""
