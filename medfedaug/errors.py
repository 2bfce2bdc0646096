"""Errors for users: one line that names the problem, its place and a remedy."""

import errno
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from medfedaug.utils.printable import printable

# Marks of text that must not leave a site, from Unicode's private use area; never shown.
_NAME, _DETAIL, _END = "\ue000", "\ue001", "\ue002"
_MARKS = re.compile(f"[{_NAME}{_DETAIL}{_END}]")
_MARKED = re.compile(f"([{_NAME}{_DETAIL}])([^{_END}]*){_END}")


def own(name: object) -> str:
    """Mark a name of a file, case or patient in the text of an error.

    ``str(error)`` shows the name; the site sends a pseudonym in its place.
    """
    return f"{_NAME}{_MARKS.sub('?', str(name))}{_END}"


def withheld(text: object) -> str:
    """Mark the text of another library in an error, which the site does not send."""
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
    """Return the line of an error with a replacement for each marked name.

    Example:
        >>> replace_own(DataError("is constant", path="Meyer.nii"), lambda name: "a case")
        'a case: is constant.'
    """
    return _MARKED.sub(lambda m: stand_in(m[2]) if m[1] == _NAME else "…", error.marked)


class ConfigError(MedFedAugError):
    """Impossible run: an unknown method, network or option, or an impossible combination."""


class DataError(MedFedAugError):
    """A site's data cannot be used.

    Args:
        problem: the problem, without a full stop.
        site: the name of the site, if any.
        path: the file or folder, if any.
        hint: the remedy.
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
    """Warning about possibly intended input, in one line."""


WITH_BATCH_NORM = (
    "choose another network, or batch norm: norm='batch', on the command line "
    '--network-args \'{"norm": "batch"}\''
)
"""Remedy for a method without a matching layer, for the command line and for Python."""


def warn(problem: str, *, site: str | None = None, path: str | Path | None = None, hint: str = "") -> None:
    """Warn with a line in the form of `DataError`."""
    warnings.warn(str(DataError(problem, site=site, path=path, hint=hint)), MedFedAugWarning, stacklevel=2)


@contextmanager
def warnings_to(tell: Callable[[str], None], seen: set[str] | None = None) -> Iterator[None]:
    """Pass each of our warnings once to a function, but for texts in ``seen``; show others as before."""
    seen = set() if seen is None else seen

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if not issubclass(category, MedFedAugWarning):
            before(message, category, *args, **kwargs)
        elif str(message) not in seen:
            seen.add(str(message))
            tell(str(message))

    with warnings.catch_warnings():
        before, warnings.showwarning = warnings.showwarning, show
        warnings.simplefilter("always", MedFedAugWarning)
        yield


class StorageError(MedFedAugError):
    """A file cannot be written, for a cause of the system; an earlier file of this name is unchanged."""

    def __init__(self, path: str | Path, cause: OSError) -> None:
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else cause.strerror or str(cause)
        text = f"{own(path)}: cannot be written: {what}. An earlier file of this name is unharmed."
        super().__init__(" ".join(text.split()) + (" Free some space and start again." if full else ""))


class UpdateRefused(MedFedAugError):
    """Refusal of a site's update, which would damage the global model; ``key`` is the offending entry."""

    def __init__(self, site: str, key: str, *, expected: str, got: str) -> None:
        super().__init__(f"site {site}, {key}: expected {expected}, got {got}")


class PrivacyRefused(MedFedAugError):
    """Refusal of a request by a site's privacy policy."""

    def __init__(self, site: str, reason: str) -> None:
        super().__init__(f"site {site}: {reason}")


class JobRefused(MedFedAugError):
    """Refusal of a job by a site's rules; the reason names the job's demand and the rule against it."""

    def __init__(self, site: str, reason: str) -> None:
        super().__init__(f"site {site}: job refused: {reason}")


class ReaderError(ValueError):
    """A file or folder cannot be read; a `DataError` that names the file shows the whole line."""


class RunFailed(MedFedAugError):
    """A federation ended before its last round."""


@contextmanager
def translated(*kinds: type[BaseException], to: Callable[[Any], Exception]) -> Iterator[None]:
    """Replace other libraries' errors of some kinds by one of ours, which ``to`` makes.

    ``to`` may return the error itself, which then passes.

    Example:
        >>> with translated(ValueError, to=lambda error: ConfigError(f"rounds: {first_line(error)}")):
        ...     int("x")
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: rounds: invalid literal for int() with base 10: 'x'
    """
    try:
        yield
    except kinds as error:
        ours = to(error)
        if ours is error:
            raise
        raise ours from error


def storing(path: str | Path) -> AbstractContextManager[None]:
    """Replace the system's errors by a `StorageError`, which names the file or folder to be written."""
    return translated(OSError, to=lambda error: StorageError(path, error))


def data_errors(
    problem: str,
    *kinds: type[Exception],
    site: str | None = None,
    path: str | Path | None = None,
    hint: str = "",
) -> AbstractContextManager[None]:
    """Replace other libraries' errors by a `DataError`, which gives their text in brackets."""
    return translated(
        *kinds,
        to=lambda error: DataError(f"{problem} ({withheld(error)})", site=site, path=path, hint=hint),
    )


def config_errors(problem: str, *kinds: type[Exception], remedy: str = "") -> AbstractContextManager[None]:
    """Replace errors of some kinds by a `ConfigError`: the problem, the error's reason, the remedy.

    By default all errors are replaced, except ours.

    Example:
        >>> with config_errors("lesion_net"):
        ...     dict(3)
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: lesion_net: 'int' object is not iterable
    """

    def named(error: Exception) -> Exception:
        if isinstance(error, MedFedAugError) and not kinds:
            return error
        return ConfigError(f"{problem}: {_reason(error)}{remedy}")

    return translated(*(kinds or (Exception,)), to=named)


def _reason(error: Exception) -> str:
    if isinstance(error, MedFedAugError):
        return error.marked
    if isinstance(error, OSError) and error.strerror:  # its text repeats the path
        return error.strerror
    # Functions of this package raise these: their texts are whole sentences. A subclass may have a page.
    whole = " ".join(str(error).split()) if type(error) in (TypeError, ValueError, ReaderError) else ""
    return whole or first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, short enough for one line of ours."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
