"""Errors that a user meets: each is one line that names what is wrong, where, and what to do."""

from __future__ import annotations

import errno
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medfedaug.utils.printable import printable

__all__ = [
    "WITH_BATCH_NORM",
    "ConfigError",
    "DataError",
    "JobRefused",
    "MedFedAugError",
    "MedFedAugWarning",
    "PrivacyRefused",
    "ReaderError",
    "RunFailed",
    "StorageError",
    "UpdateRefused",
    "first_line",
    "own",
    "replace_own",
    "warn",
    "warnings_to",
    "withheld",
]

# Around text that must not leave a site; of Unicode's private use area, and in no message that is shown.
_NAME, _DETAIL, _END = "\ue000", "\ue001", "\ue002"
_MARKS = re.compile(f"[{_NAME}{_DETAIL}{_END}]")
_MARKED = re.compile(f"([{_NAME}{_DETAIL}])([^{_END}]*){_END}")


def own(name: object) -> str:
    """Mark what names a file, a case or a patient of a site in the text of an error.

    ``str(error)`` shows it as it is; what the site sends has a pseudonym in its place.
    """
    return f"{_NAME}{_MARKS.sub('?', str(name))}{_END}"


def withheld(text: object) -> str:
    """Mark what another library said in the text of an error: what the site sends does not have it."""
    return f"{_DETAIL}{_MARKS.sub('?', str(text))}{_END}"


class MedFedAugError(Exception):
    """Base class; ``str(error)`` is one printable line, fit to be shown without a traceback.

    Args:
        text: the line, in which `own` marks what must not leave a site.
    """

    def __init__(self, text: object = "") -> None:
        self.marked = str(text)
        super().__init__(printable(_MARKED.sub(r"\2", self.marked)))


def replace_own(error: MedFedAugError, stand_in: Callable[[str], str]) -> str:
    """The line of an error with something else for what is the site's own.

    Args:
        error: the error.
        stand_in: called with each name.

    Example:
        >>> replace_own(DataError("is constant", path="Meyer.nii"), lambda name: "a case")
        'a case: is constant.'
    """
    return _MARKED.sub(lambda m: stand_in(m[2]) if m[1] == _NAME else "…", error.marked)


class ConfigError(MedFedAugError):
    """A run was asked for that cannot be: an unknown method, network or option, or a combination of them."""


class DataError(MedFedAugError):
    """A site's data cannot be used.

    Args:
        problem: what is wrong, without a full stop.
        site: the site's name, where one is concerned.
        path: the file or folder, where one is concerned.
        hint: what to do about it.
    """

    def __init__(
        self, problem: str, *, site: str | None = None, path: str | Path | None = None, hint: str = ""
    ) -> None:
        where = [f"site {site}"] if site else []
        if path is not None:
            where.append(own(path))
        text = ": ".join([", ".join(where), problem]) if where else problem
        super().__init__(" ".join(f"{text}. {hint}".split()).rstrip())


class MedFedAugWarning(UserWarning):
    """Warning about something that may be intended; one line, as an error is."""


WITH_BATCH_NORM = (
    "choose another network, or batch norm: norm='batch', on the command line "
    '--network-args \'{"norm": "batch"}\''
)
"""Remedy where a method finds no layer of its kind, for the command line and for Python."""


def warn(problem: str, *, site: str | None = None, path: str | Path | None = None, hint: str = "") -> None:
    """Warn with a line like that of `DataError`."""
    warnings.warn(str(DataError(problem, site=site, path=path, hint=hint)), MedFedAugWarning, stacklevel=2)


@contextmanager
def warnings_to(tell: Callable[[str], None], told: set[str] | None = None) -> Iterator[None]:
    """Give our warnings to a function in place of showing them, each once; others are shown as before.

    Args:
        tell: called with each.
        told: those that it was given earlier; new ones are added.
    """
    told = set() if told is None else told

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if not issubclass(category, MedFedAugWarning):
            before(message, category, *args, **kwargs)
        elif str(message) not in told:
            told.add(str(message))
            tell(str(message))

    with warnings.catch_warnings():
        before, warnings.showwarning = warnings.showwarning, show
        warnings.simplefilter("always", MedFedAugWarning)
        yield


class StorageError(MedFedAugError):
    """A file could not be written; the one that was there before is as it was.

    Args:
        path: the file.
        cause: what the operating system said.
    """

    def __init__(self, path: str | Path, cause: OSError) -> None:
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else cause.strerror or str(cause)
        text = f"{own(path)}: cannot be written: {what}. An earlier file of this name is unharmed."
        super().__init__(" ".join(text.split()) + (" Free some space and start again." if full else ""))


class UpdateRefused(MedFedAugError):
    """Refusal of a site's update, which would damage the global model.

    Args:
        site: who sent it.
        key: the offending entry.
        expected: what the server was waiting for.
        got: what came.
    """

    def __init__(self, site: str, key: str, *, expected: str, got: str) -> None:
        self.site, self.key = site, key
        super().__init__(f"site {site}, {key}: expected {expected}, got {got}")


class PrivacyRefused(MedFedAugError):
    """A site keeps back what it was asked for, because its own privacy policy says so.

    Args:
        site: the site.
        reason: what the policy does not allow, without a full stop.
    """

    def __init__(self, site: str, reason: str) -> None:
        self.site = site
        super().__init__(f"site {site}: {reason}")


class JobRefused(MedFedAugError):
    """A site does not take part in a job, because its own rules for jobs say so.

    Args:
        site: the site.
        reason: what the job wants, and the rule that does not allow it, without a full stop.
    """

    def __init__(self, site: str, reason: str) -> None:
        self.site = site
        super().__init__(f"site {site}: job refused: {reason}")


class ReaderError(ValueError):
    """A file or folder cannot be read; its one line is shown whole, in a `DataError` that names the file."""


class RunFailed(MedFedAugError):
    """A federation ended before its last round."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, short enough for one line of ours."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
