"""Files that are written whole or not at all, and JSON that is parsed strictly."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from medfedaug.errors import StorageError

PRIVATE = 0o600
"""The mode of a file that its owner alone may read."""

_DEEPEST = 100
"""Levels of nested lists and objects in JSON; Python's own functions give up at some hundreds."""

_UNFINISHED = re.compile(r"\..+\.(pt|json|key|nii\.gz)\.[0-9a-f]{8}")
"""By what `write_atomic` names a file while it writes one that a site or a server keeps."""


def write_atomic(
    path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any], *, private: bool = False
) -> None:
    """Write a file so that at every moment the old one or the new one is there, whole.

    A process that is killed leaves an unfinished file behind, which `remove_unfinished` knows.

    Args:
        path: the file; an existing one is replaced, and may be read by those who might read it before.
        write: called with a file open for writing.
        private: whether the file may be read by its owner alone, from its first byte on, whatever the umask
            and whoever could read the one before.

    Raises:
        StorageError: naming the file, when the disk is full or the folder cannot be written; what was there
            before stays as it was.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "note.txt"
        >>> write_atomic(path, lambda file: file.write(b"kept"))
        >>> path.read_text()
        'kept'
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        temporary, descriptor = _create_locked(path, PRIVATE if private else 0o666)
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


def _create_locked(path: Path, mode: int) -> tuple[Path, int]:
    """A new file beside another one, locked as long as it is open, and its descriptor."""
    while True:
        # In the same folder, since a rename is atomic within one file system only; not by `mkstemp`, whose
        # files can be read by their owner alone, whatever the umask.
        candidate = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with suppress(OSError):  # a file system without locks: there `remove_unfinished` removes nothing
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the two it may have looked as if nobody wrote it.
            if os.stat(candidate).st_ino == os.fstat(descriptor).st_ino:
                return candidate, descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Remove what processes of this user left in a folder that were killed while they wrote a file.

    Only files that `write_atomic` has named, and that no process holds: a writer keeps its file locked.
    """
    try:
        found = [entry for entry in os.scandir(folder) if _UNFINISHED.fullmatch(entry.name)]
    except OSError:
        return
    for entry in found:
        with suppress(OSError):
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
            finally:
                os.close(descriptor)


def private_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and those that are missing above it, for their owner alone; others stay as they are."""
    path = Path(path)
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(0o700, exist_ok=True)


def make_private(path: str | os.PathLike[str]) -> None:
    """Take a file that is there away from all but its owner; what another user owns stays as it is."""
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        with suppress(PermissionError):
            os.chmod(path, PRIVATE)


def _system_error(error: BaseException | None) -> OSError | None:
    """The operating system's error behind an exception: PyTorch raises its own while it closes a file."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def real_paths(paths: Iterable[Path]) -> dict[Path, Path]:
    """Find where files lie, without links; a folder is looked up once, however many files it has.

    Unlike `Path.resolve`, this takes a link to itself.
    """
    folders: dict[Path, str] = {}
    found: dict[Path, Path] = {}
    for path in paths:
        parent = path.parent
        if parent not in folders:
            folders[parent] = os.path.realpath(parent)
        there = os.path.join(folders[parent], path.name)
        whole = os.path.islink(there) or path.name in ("", "..")
        found[path] = Path(os.path.realpath(path) if whole else there)
    return found


def sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def write_text(path: str | os.PathLike[str], text: str, *, private: bool = False) -> None:
    """Write a text in UTF-8, as `write_atomic` does."""
    write_atomic(path, lambda file: file.write(text.encode("utf-8", "replace")), private=private)


def write_json(path: str | os.PathLike[str], content: Any, *, private: bool = False) -> None:
    """Write indented JSON, as `write_atomic` does.

    Raises:
        ValueError: for NaN and infinity, which are not JSON.
        StorageError: when the file cannot be written.
    """
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n", private=private)


def parse_json(text: str) -> Any:
    """Parse JSON in which no key occurs twice; Python's own reader would keep the last value only.

    Raises:
        ValueError: for text that is not JSON, is nested too deeply, or has a key twice in one object.

    Example:
        >>> parse_json('{"A": 1, "A": 2}')
        Traceback (most recent call last):
        ValueError: 'A' occurs twice
    """
    try:
        content = json.loads(text, object_pairs_hook=_reject_duplicates)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    check_depth(content)
    return content


def check_depth(content: Any) -> None:
    """Check that lists and objects are nested at most 100 deep: copying deeper ones would fail."""
    level = [content]
    for _ in range(_DEEPEST):
        level = [
            child
            for one in level
            if isinstance(one, dict | list | tuple)
            for child in (one.values() if isinstance(one, dict) else one)
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
    """Write a JSON file that says what it is, for `parse_versioned`."""
    write_json(path, {**version_mark(kind, version), **content}, private=private)


def version_mark(kind: str, version: int) -> dict[str, Any]:
    """The entries by which `check_version` knows a file."""
    return {"format": f"medfedaug.{kind}", "version": version}


def parse_versioned(text: str, kind: str, version: int) -> dict[str, Any]:
    """The entries of a file that `write_versioned` wrote.

    Raises:
        ValueError: for text that is not JSON, says something twice, or is of another kind or version.

    Example:
        >>> parse_versioned('{"format": "medfedaug.statistics", "version": 2}', "statistics", 1)
        Traceback (most recent call last):
        ValueError: version is 2, this release reads 1
    """
    return check_version(parse_json(text), kind, version)


def check_version(content: Any, kind: str, version: int) -> dict[str, Any]:
    """Check the kind and version of a file's content, and return the content."""
    if not isinstance(content, dict) or content.get("format") != f"medfedaug.{kind}":
        raise ValueError(f'not a {kind} file: expected "format": "medfedaug.{kind}"')
    found = content.get("version")
    if isinstance(found, bool) or found != version:
        raise ValueError(f"version is {found!r}, this release reads {version}")
    return content
