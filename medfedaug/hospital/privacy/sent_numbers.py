"""List the numbers that a site's answers may have: no other number leaves a site of a real federation.

``tests/hospital/privacy/test_sent_numbers.py`` compares the list with the table of
``docs/privacy/policy.md``, and the messages of federations with both.
"""

import math
from collections.abc import Mapping
from typing import Any

from medfedaug.federation.job_folder import COUNTS
from medfedaug.metrics.registry import METRICS

METRIC = "METRIC"
"""Placeholder for the name of a metric."""

_OF_SCORES = (METRIC, "cases", "scored_cases", "note", "unit")
_OF_NOISE = ("privacy/epsilon", "privacy/delta", "privacy/weights", "privacy/score_epsilon")

SENT: Mapping[str, tuple[str, ...]] = {
    "fingerprint": _OF_NOISE,
    "prepare": ("cases", "input", "spacing", COUNTS, *_OF_NOISE),
    "train": (f"val_{METRIC}", "val_note", "seconds", *_OF_NOISE),
    "validate": _OF_SCORES,
    "test": _OF_SCORES,
    "score": (*_OF_SCORES, "against", "seconds"),
}
"""The entries of `medfedaug.federation.messages.messages.Reply.metrics` by task.

Methods' summaries of their training are not among them: they are exact numbers about a site's images, and a
job would get as many as it has rounds."""


def listed_name(name: str) -> str:
    """Return the name of an answer's entry in `SENT`.

    Example:
        >>> listed_name("val_dice"), listed_name("auc"), listed_name("seconds")
        ('val_METRIC', 'METRIC', 'seconds')
    """
    prefix = "val_" if name.startswith("val_") else ""
    return f"{prefix}{METRIC}" if name.removeprefix(prefix) in METRICS else name


def sent_numbers(task: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an answer that may leave, with times in whole seconds."""
    names = SENT.get(task, ())
    sent = {name: value for name, value in metrics.items() if listed_name(name) in names}
    return sent | {"seconds": math.ceil(sent["seconds"])} if "seconds" in sent else sent
