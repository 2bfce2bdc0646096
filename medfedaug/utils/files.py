"""Files that are written whole or not at all, and JSON that is parsed strictly."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml

from medfedaug.errors import ConfigError, StorageError, config_errors, translated

PRIVATE = 0o600  # mode of a file that only its owner may read

_DEEPEST = 100  # levels of nested lists and objects in JSON; Python's own functions fail at some hundreds

_UNFINISHED = re.compile(r"\..+\.(pt|json|key|nii\.gz)\.[0-9a-f]{8}")
"""Name of an unfinished file of `write_atomic`, of those that a site or a server keeps."""

_ABANDONED = 3600.0


def write_atomic(
    path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any], *, private: bool = False
) -> None:
    """Write a file so that at every moment the whole old file or the whole new one exists.

    A process that is killed leaves an unfinished file behind, which `remove_unfinished` removes.

    Args:
        path: the file; it replaces an existing one and keeps its mode. A missing folder is made.
        private: whether only the owner may read the file, from its first byte on, with any umask and any mode
            of the file before; a new folder, too, is only for the owner.

    Raises:
        ConfigError: for an empty name, a folder or a pipe.
        StorageError: naming the file, when the disk is full or the folder cannot be written; the old file
            stays.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "note.txt"
        >>> write_atomic(path, lambda file: file.write(b"kept"))
        >>> path.read_text()
        'kept'
    """
    path = Path(path)
    if not path.name or (path.exists() and not path.is_file()):
        raise ConfigError(f"{str(path)!r}: cannot be written as a file; name another one")
    temporary: Path | None = None
    try:
        path.parent.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
        # In the same folder, since a rename is atomic within one file system only; not by `mkstemp`, which
        # ignores the umask.
        candidate = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE if private else 0o666)
        temporary = candidate
        with os.fdopen(descriptor, "wb") as file:
            if private:
                os.fchmod(descriptor, PRIVATE)
            elif path.exists():
                temporary.chmod(stat.S_IMODE(path.stat().st_mode))
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        cause = _system_error(error)
        if cause is None:
            raise
        raise StorageError(path, cause) from error


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Remove the unfinished files of `write_atomic` that no process has written to for an hour."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if _UNFINISHED.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - _ABANDONED:
                os.unlink(entry.path)


def private_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and its missing parents for their owner only; existing ones stay as they are."""
    path = Path(path)
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(0o700, exist_ok=True)


def make_private(path: str | os.PathLike[str]) -> None:
    """Let only the owner read an existing file; a file of another user stays as it is."""
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        with suppress(PermissionError):
            os.chmod(path, PRIVATE)


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error behind an exception: PyTorch raises another while it closes a file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def check_empty(path: Path) -> None:
    """Check that a folder is a new one, or has nothing in it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not an empty folder; choose another one")


def read_mapping(path: str | os.PathLike[str], example: str) -> dict[str, Any]:
    """Read a user's file of names and values, YAML or JSON."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: not a file")  # a pipe would wait for ever
    with config_errors(f"{path}: not readable as YAML or JSON", ValueError, RecursionError, yaml.YAMLError):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path}: names and values are needed, such as {example}")
    return content


def sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def write_text(path: str | os.PathLike[str], text: str, *, private: bool = False) -> None:
    """Write a text in UTF-8, as `write_atomic` does."""
    write_atomic(path, lambda file: file.write(text.encode("utf-8", "replace")), private=private)


def write_json(path: str | os.PathLike[str], content: Any, *, private: bool = False) -> None:
    """Write indented JSON, as `write_atomic` does."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n", private=private)


def parse_json(text: str) -> Any:
    """Parse JSON in which no key occurs twice; Python's own reader would keep the last value only.

    Example:
        >>> parse_json('{"A": 1, "A": 2}')
        Traceback (most recent call last):
        ValueError: 'A' occurs twice
    """
    with translated(RecursionError, to=lambda error: ValueError("nested too deeply")):
        content = json.loads(text, object_pairs_hook=_reject_duplicates)
    check_depth(content)
    return content


def check_depth(content: Any) -> None:
    """Check that lists and objects are nested at most 100 deep: copying deeper ones would fail."""
    level = [content]
    for _ in range(_DEEPEST):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list | tuple)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {_DEEPEST} deep")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"'{twice}' occurs twice")
    return result


def write_versioned(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    content: Mapping[str, Any],
    *,
    private: bool = False,
) -> None:
    """Write a JSON file with its kind and version, for `parse_versioned`."""
    write_json(path, {**version_mark(kind, version), **content}, private=private)


def version_mark(kind: str, version: int) -> dict[str, Any]:
    """Return the entries of a file that `check_version` checks."""
    return {"format": f"medfedaug.{kind}", "version": version}


def parse_versioned(text: str, kind: str, version: int) -> dict[str, Any]:
    """Return the entries of a file that `write_versioned` wrote."""
    return check_version(parse_json(text), kind, version)


def check_version(content: Any, kind: str, version: int) -> dict[str, Any]:
    """Check the kind and version of a file's content, and return the content."""
    mark = version_mark(kind, version)
    found = {key: content.get(key) for key in mark} if isinstance(content, dict) else {}
    if found != mark:
        raise ValueError(f"not a {kind} file of this release: expected {mark}, got {found}")
    return content
