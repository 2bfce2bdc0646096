"""`Pseudonyms`: replace the names of a site's cases, files and patients in everything that leaves it."""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from medfedaug.errors import ConfigError, MedFedAugError, StorageError, replace_own
from medfedaug.utils.files import private_folder, remove_unfinished, write_atomic
from medfedaug.utils.printable import printable

if TYPE_CHECKING:
    from medfedaug.data.base import SiteFolder

PSEUDONYM_KEY = "pseudonyms.key"
"""File of a site's key, below its state folder."""

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
        try:
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
        except (OSError, StorageError, ValueError) as error:
            raise ConfigError(f"{path}: the site's key of pseudonyms cannot be used ({error})") from error
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
