"""Changes of a JSON file: each entry in turn is replaced by what nobody means, or deleted."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["CASES", "SEEDS", "TEXTS", "VALUES", "changes"]

VALUES = [
    *(None, "x", "", -1, 0, 1.5, 1e308, 10**400, float("nan"), True),
    *([], {}, [[]], ["x"], [None], {"a": {}}, {"x": None}, {"x": [1]}),
]
"""What is put in the place of any entry."""

CASES = 20
"""Changes of each record for a seed; drawn, since all of them take minutes."""

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
"""Of the changes; those of one are tested each time."""

TEXTS = ["", "{", "[" * 100_000 + "]" * 100_000, "\x00", '{"a": 1, "a": 2}', "[1e999]", "[]", "3"]
"""What is no record at all."""

Place = tuple[Any, ...]


def _places(content: Any, path: Place = ()) -> Iterator[Place]:
    """Every entry, of lists the first."""
    yield path
    listed = enumerate(content[:1]) if isinstance(content, list) else ()
    for key, value in content.items() if isinstance(content, dict) else listed:
        yield from _places(value, (*path, key))


def changes(content: Any, seed: str, number: int = CASES) -> Iterator[tuple[Place, Any]]:
    """Copies of a record, each with one entry replaced or deleted, and the place of the change."""
    drawn = random.Random(seed)
    possible = [(path, value) for path in _places(content) for value in (*VALUES, ...)]
    for path, value in drawn.sample(possible, min(number, len(possible))):
        changed = copy.deepcopy(content)
        if not path:
            yield path, None if value is ... else value
            continue
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        if value is ...:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        yield path, changed
