"""Check of combinations: a run's methods, network and options."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from medfedaug.errors import ConfigError
from medfedaug.methods.base import WORDS, Method

_METHOD = "method:"
_NONE = frozenset[str]()

# Hooks that decide which values leave a site.
_SHARING = ("local_entries", "before_training", "every_round", "aggregator")


@dataclass(frozen=True)
class Constraints:
    """Words that a part of a run requires, provides and excludes: a method, network, loss or option.

    Words are those of `medfedaug.methods.base.WORDS`, or ``method:NAME``. ``hint`` is advice for a refused
    combination, by default to leave one of the two out.
    """

    name: str
    requires: frozenset[str] = _NONE
    provides: frozenset[str] = _NONE
    excludes: frozenset[str] = _NONE
    hint: str = ""


def constraints(method: Method) -> Constraints:
    """Return the words that a method declares, and the words that follow from its hooks.

    A method provides and excludes ``method:`` and its name. A method with an `Aggregator` provides and
    excludes ``global_model``. A method with an exchange, local entries or an `Aggregator` requires
    ``separate_sites``.
    """
    declared = {name: frozenset(getattr(method, name)) for name in ("requires", "provides", "excludes")}
    alone = {f"{_METHOD}{method.name}", *(["global_model"] if _has(method, "aggregator") else [])}
    shares = any(_has(method, hook) for hook in _SHARING)
    return Constraints(
        method.name,
        requires=declared["requires"] | ({"separate_sites"} if shares else _NONE),
        provides=declared["provides"] | alone,
        excludes=declared["excludes"] | alone,
    )


def check_compatible(parts: Sequence[Constraints]) -> None:
    """Check that no part of a run excludes a word that another requires or provides."""
    order = [*sorted({w for part in parts for w in part.excludes if w.startswith(_METHOD)}), *WORDS]
    for word, (excluding, user) in itertools.product(order, itertools.permutations(parts, 2)):
        if word in excluding.excludes and word in user.requires | user.provides:
            first, second = sorted((excluding, user), key=parts.index)
            verb = "requires" if word in user.requires else "provides"
            meaning = WORDS[word].replace("`", "") if word in WORDS else "all that this method does"
            hint = excluding.hint or user.hint or "leave one of the two out"
            raise ConfigError(
                f"{first.name} and {second.name} cannot be combined: {user.name} {verb} "
                f"{word} ({meaning}), {excluding.name} excludes it; {hint}"
            )


def methods_with(methods: Iterable[Method], word: str, attribute: str = "provides") -> list[Method]:
    """Return the methods with a word among those that they provide, or in another attribute."""
    return [method for method in methods if word in getattr(method, attribute)]


def _has(method: Method, hook: str) -> bool:
    return getattr(type(method), hook) is not getattr(Method, hook)
