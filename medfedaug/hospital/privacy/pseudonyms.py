"""Replace in what leaves a site its own names (`Pseudonyms`), and in its messages the text of a job."""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from medfedaug.config.run import RunConfig
from medfedaug.errors import MedFedAugError, config_errors, own, replace_own
from medfedaug.utils import plugins
from medfedaug.utils.files import private_folder, remove_unfinished, write_atomic
from medfedaug.utils.printable import printable

if TYPE_CHECKING:
    from medfedaug.data.base import SiteFolder

PSEUDONYM_KEY = "pseudonyms.key"  # file of a site's key, below its state folder

_KEY_BYTES, _DIGITS = 32, 12
_MOST_NAMES = 100_000
_WITHHELD = "…"

# Common names of folders, and words of our messages.
_COMMON = frozenset(
    (
        *("channel_names", "classes", "data", "dataset", "description", "image", "images", "imagestr"),
        *("imagests", "label", "labels", "labelstr", "labelsts", "mask", "masks", "modality", "name"),
        *("patient", "site", "splits", "test", "training", "validation"),
    )
)
# To the next mark of punctuation, since a path may have spaces.
_PATH = re.compile(r"""(?<![\w.])(?:[A-Za-z]:\\|~?/)[^\s'",;:()\[\]][^'",;:()\[\]]*""")


class Pseudonyms:
    """Pseudonyms of a site's names.

    The pseudonym of a name is the beginning of HMAC-SHA256(key, name). The key stays in a file of the site.
    So pseudonyms are the same in all runs, scores can be paired over runs, and nobody without the key can
    test a guessed name.

    Example:
        >>> Pseudonyms(b"key").of("Meyer_Hans")
        'case-8fad8beb7676'
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of_site(cls, folder: str | Path) -> Pseudonyms:
        """Return the pseudonyms of a site from the key in its state folder, which is made if missing."""
        path = Path(folder) / PSEUDONYM_KEY
        with config_errors(f"{own(path)}: the site's key of pseudonyms cannot be used"):
            private_folder(path.parent)
            with FileLock(path.with_name(f"{path.name}.lock")):
                remove_unfinished(path.parent)
                if not path.exists():
                    # Whole or not at all: a partial key would never be replaced.
                    new = f"{secrets.token_hex(_KEY_BYTES)}\n".encode()
                    write_atomic(path, lambda file: file.write(new), private=True)
                key = bytes.fromhex(path.read_text().strip())
            if len(key) != _KEY_BYTES:
                raise ValueError(f"not a key of {_KEY_BYTES} bytes")
        return cls(key)

    def of(self, name: str, kind: str = "case") -> str:
        """Return the pseudonym of a name."""
        digest = hmac.new(self._key, name.encode("utf-8", "replace"), "sha256").hexdigest()
        return f"{kind}-{digest[:_DIGITS]}"

    def uid(self, uid: str) -> str:
        """Return the pseudonym of a DICOM UID.

        Example:
            >>> Pseudonyms(b"key").uid("1.2.3")
            '2.25.86030870057835775672848420887878462706'
        """
        digest = hmac.new(self._key, f"uid {uid}".encode(), "sha256").digest()
        return f"2.25.{int.from_bytes(digest[:16], 'big')}"

    def text(self, error: MedFedAugError, site: str, data: SiteFolder | Path | None = None) -> str:
        """Return the line of an error without names of files, cases and patients; the site's name stays.

        Names in the site's data are replaced; ``data`` is their folder if they could not be opened.
        """
        opened = None if isinstance(data, Path) else data
        folder = data if isinstance(data, Path) else data.path if data is not None else None
        cases = _case_names(opened) if opened is not None else {}

        def pseudonym(text: str) -> str:
            if text in cases:
                return self.of(cases[text])
            if os.path.isabs(text) and not (folder and Path(text).is_relative_to(folder)):
                return _WITHHELD
            # A file's name without its suffix is the name of its case, if no case is known yet.
            bare, *suffix = Path(text).name.split(".")
            return self.of(bare) if suffix else self.of(text, "name")

        public = replace_own(error, pseudonym)
        names = {*cases, *(_names_below(folder) if folder is not None else ())}
        names -= {site} if opened is None else {site, *opened.classes, *opened.channel_names}
        secret = sorted((n for n in names if n in public and _identifies(n)), key=len, reverse=True)
        if secret:
            pattern = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in secret)
            public = re.sub(pattern, lambda match: pseudonym(match.group()), public)
        # Last, since escapes would hide names.
        return printable(_PATH.sub(_WITHHELD, public))


def public_text(error: MedFedAugError) -> str:
    """Return the line of an error without names or paths of the site, where it has no pseudonyms."""
    return printable(_PATH.sub(_WITHHELD, replace_own(error, lambda text: _WITHHELD)))


def _case_names(data: SiteFolder) -> dict[str, str]:
    """Return all names of a case that a message may have, each with the name of the case."""
    by_name: dict[str, str] = {}
    for case in (case for cases in data.cases.values() for case in cases):
        files = [*case.files, *([case.label] if isinstance(case.label, Path) else [])]
        names = [case.name, *map(str, files), *(file.name for file in files)]
        for name in names if case.index is None else [case.name]:
            by_name.setdefault(name, case.name)
        if case.patient:
            by_name.setdefault(case.patient, case.patient)
    return by_name


def _names_below(folder: Path) -> Iterator[str]:
    """Yield names of files and folders, and names from the site's list of cases."""
    paths = (Path(root) / name for root, folders, files in os.walk(folder) for name in (*folders, *files))
    for count, path in enumerate(paths):
        if count == _MOST_NAMES:
            return
        yield from (path.name, str(path), path.name.split(".")[0])
    with suppress(OSError, ValueError, RecursionError):
        yield from _texts(json.loads((folder / "dataset.json").read_text(encoding="utf-8")))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from (value, Path(value).name, Path(value).name.split(".")[0])
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, dict):
        for name in ("training", "validation", "test", "image", "label", "patient"):
            yield from _texts(value.get(name))


def _identifies(name: str) -> bool:
    """Return whether a name may identify a person: neither a common word nor a small number."""
    bare = name.casefold().removesuffix(".json")
    return len(name) > 2 and bare not in _COMMON and not (name.isdigit() and len(name) < 5)


# Pieces of this length of longer texts are recognised, since messages shorten quotations.
_PIECE = 12
_QUOTED_ONLY = 3  # texts up to this length are replaced only in quotation marks: a class may be called `a`
_LONGEST_KEY, _MOST = 40, 1000


def without_job_text(text: str, config: Mapping[str, Any], own: Iterable[str] = ()) -> str:
    """Replace all values of the job's configuration, and its longer keys, by `…`.

    A site's message may quote the job: a class, the name of a network, an argument. A hostile job could so
    make the site confirm guesses of its secrets. The site's log has the whole message. Installed
    names (settings, methods, networks) and the site's own text stay.

    Example:
        >>> without_job_text("class 'lesion' of fedavg is odd", {"classes": ["lesion"], "method": "fedavg"})
        "class '…' of fedavg is odd"
    """
    text = "".join(character if character.isprintable() else "?" for character in text)
    known = {*_known_names(), *own}
    foreign = {form for value in _job_texts(config) if value not in known for form in _forms(value)}
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
    # Imported here, since pseudonyms need no PyTorch.
    from medfedaug.methods import method_names
    from medfedaug.models.networks import built_in_networks

    settings = fields(RunConfig)
    choices = {str(choice) for entry in settings for choice in entry.metadata.get("choices") or ()}
    added = {plugin.name for group in plugins.JOB_GROUPS for plugin in plugins.installed(group)}
    return {*choices, *added, *(entry.name for entry in settings), *method_names(), *built_in_networks()}


def _job_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from filter(None, {value, *value.split("@")})
    elif isinstance(value, Mapping):
        yield from (str(key) for key in value if len(str(key)) > _LONGEST_KEY)
        for entry in value.values():
            yield from _job_texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _job_texts(entry)


def _forms(text: str) -> Iterator[str]:
    yield text
    yield repr(text)[1:-1]
    yield json.dumps(text)[1:-1]
    yield " ".join(text.split())
    yield "".join(character if character.isprintable() else "?" for character in text)
