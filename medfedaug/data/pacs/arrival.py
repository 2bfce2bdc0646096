"""`Arrival`: the objects of one series as they come from an archive, each into a file of its own."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medfedaug.data.pacs.archive import FetchError, FoundSeries
from medfedaug.data.pacs.object_check import ObjectRefused, SeriesBounds, read_values

_MOST_USELESS = 1000


@dataclass(frozen=True)
class Failure:
    """Reason why an object did not come.

    Args:
        timed_out: whether the archive was silent.
        passing: whether another attempt may succeed.
    """

    reason: str = ""
    timed_out: bool = False
    passing: bool = True


class Arrival:
    """The objects of a series that are expected, and the folder that they are written to.

    Objects that nobody asked for are refused, and objects of others than the archive said are refused with
    the whole series. Files of an earlier call are kept. A file's name is a digest of the object's UID, so
    that no archive can choose it. Safe to be used by several threads.
    """

    def __init__(
        self,
        series: FoundSeries,
        folder: Path,
        uids: Sequence[str],
        on_instance: Callable[[], object] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {uid: folder / f"{hashlib.sha256(uid.encode()).hexdigest()[:24]}.dcm" for uid in uids}
        self._there = {uid for uid, file in self._files.items() if file.is_file()}
        self._on_instance = on_instance or (lambda: None)
        self._lock = threading.Lock()
        self._bounds, self._useless = SeriesBounds(series), 0
        self._refused: ObjectRefused | None = None
        for _ in self._there:
            self._on_instance()

    @property
    def missing(self) -> list[str]:
        """UIDs of the objects that did not come yet, sorted."""
        with self._lock:
            return sorted(self._files.keys() - self._there)

    def has(self, uid: str) -> bool:
        """Return whether an object has come."""
        with self._lock:
            return uid in self._there

    @property
    def is_refused(self) -> bool:
        """Return whether nothing of the series is used any more."""
        return self._refused is not None

    @property
    def is_endless(self) -> bool:
        """Return whether more came than anybody asked for."""
        return self._useless > _MOST_USELESS

    def accept(self, content: bytes) -> bool:
        """Write an object, and return whether it was expected.

        A process that is killed leaves the whole file, or none of its name.

        Raises:
            ObjectRefused: for an object of others than the archive said, and for many that nobody asked for.
            ReaderError: where it cannot be read.
            OSError: when it cannot be written.
        """
        values = read_values(content)
        file = self._files.get(values["SOPInstanceUID"])
        with self._lock:
            if file is None or self._refused is not None:
                self._useless += 1
                if self.is_endless:
                    self._refused = ObjectRefused(
                        "the archive sends objects without end that nobody asked for"
                    )
            if self._refused is not None:
                raise self._refused
            if file is None:
                return False
            try:
                self._bounds.check(values, len(content))
            except ObjectRefused as error:
                self._refused = error
                raise
            if values["SOPInstanceUID"] in self._there:
                return True
            unfinished = file.with_suffix(".part")
            unfinished.write_bytes(content)
            os.replace(unfinished, file)
            self._there.add(values["SOPInstanceUID"])
        self._on_instance()
        return True

    def files(self, failure: Failure) -> list[Path]:
        """Return the files, sorted."""
        if self._refused is not None:
            raise self._refused
        if missing := len(self.missing):
            said = f" ({failure.reason})" if failure.reason else ""
            raise FetchError(
                f"{missing} of {len(self._files)} objects did not come{said}", timed_out=failure.timed_out
            )
        return sorted(self._files.values())
