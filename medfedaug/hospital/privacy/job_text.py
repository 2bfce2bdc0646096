"""Removal of a job's text from a site's messages to the server.

A site's message may quote the job: a class, the name of a network, an argument. A hostile job could so make
the site confirm guesses of its secrets. The site's log has the whole message.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from medfedaug.config.run import RunConfig
from medfedaug.methods import method_names
from medfedaug.models.networks import built_in_networks
from medfedaug.utils import plugins

_WITHHELD = "…"
# Pieces of this length of longer texts are recognised, since messages shorten quotations.
_PIECE = 12
_QUOTED_ONLY = 3
"""Texts up to this length are replaced only in quotation marks: a class may be called `a`."""
_LONGEST_KEY, _MOST = 40, 1000


def without_job_text(text: str, config: Mapping[str, Any], own: Iterable[str] = ()) -> str:
    """Replace all values of the job's configuration, and its longer keys, by `…`.

    Installed names (settings, methods, networks) and the site's own text stay.

    Example:
        >>> without_job_text("class 'lesion' of fedavg is odd", {"classes": ["lesion"], "method": "fedavg"})
        "class '…' of fedavg is odd"
    """
    text = "".join(character if character.isprintable() else "?" for character in text)
    known = {*_known_names(), *own}
    foreign = {form for value in _texts(config) if value not in known for form in _forms(value)}
    marked = [False] * len(text)
    pieces = {form[i : i + _PIECE] for form in foreign for i in range(len(form) - _PIECE + 1)}
    for start in range(len(text) - _PIECE + 1):
        if text[start : start + _PIECE] in pieces:
            marked[start : start + _PIECE] = [True] * _PIECE
    for form in (form for form in foreign if 0 < len(form) < _PIECE):
        edges = ("(?<=['\"])", "(?=['\"])") if len(form) <= _QUOTED_ONLY else (r"(?<!\w)", r"(?!\w)")
        for match in re.finditer(re.escape(form).join(edges), text):
            marked[match.start() : match.end()] = [True] * len(match.group())
    for word in filter(None, known):
        for match in re.finditer(rf"(?<![\w.]){re.escape(word)}(?![\w])", text):
            marked[match.start() : match.end()] = [False] * len(match.group())
    visible = "".join("\0" if hidden else character for character, hidden in zip(text, marked, strict=True))
    return re.sub("\0+", _WITHHELD, visible)[:_MOST]


def _known_names() -> set[str]:
    settings = fields(RunConfig)
    choices = {str(choice) for entry in settings for choice in entry.metadata.get("choices") or ()}
    added = {plugin.name for group in plugins.JOB_GROUPS for plugin in plugins.installed(group)}
    return {*choices, *added, *(entry.name for entry in settings), *method_names(), *built_in_networks()}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from filter(None, {value, *value.split("@")})
    elif isinstance(value, Mapping):
        yield from (str(key) for key in value if len(str(key)) > _LONGEST_KEY)
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


def _forms(text: str) -> Iterator[str]:
    yield text
    yield repr(text)[1:-1]
    yield json.dumps(text)[1:-1]
    yield " ".join(text.split())
    yield "".join(character if character.isprintable() else "?" for character in text)
