"""`Arrival`: write the objects of one series, as they come from an archive, into one file each."""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medfedaug.hospital.pacs.archive import ArchiveSeries, FetchError
from medfedaug.hospital.pacs.object_check import ObjectRefused, SeriesBounds, read_values


@dataclass(frozen=True)
class Failure:
    """Reason why an object is missing; after a ``passing`` failure another attempt may succeed."""

    reason: str = ""
    timed_out: bool = False
    passing: bool = True


class Arrival:
    """Expected objects of a series, and the folder to which they are written.

    Unrequested objects are refused; an object of another patient, study or series is refused with the whole
    series. Files of an earlier call are kept. A file's name is a digest of the object's UID, so that no
    archive can choose it. Several threads may use it.
    """

    def __init__(
        self,
        series: ArchiveSeries,
        folder: Path,
        uids: Sequence[str],
        on_instance: Callable[[], object] = lambda: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {uid: folder / f"{hashlib.sha256(uid.encode()).hexdigest()[:24]}.dcm" for uid in uids}
        self._received = {uid for uid, file in self._files.items() if file.is_file()}
        self._on_instance = on_instance
        self._lock = threading.Lock()
        self._bounds = SeriesBounds(series)
        self._refused: ObjectRefused | None = None
        for _ in self._received:
            self._on_instance()

    @property
    def missing(self) -> list[str]:
        """UIDs of the missing objects, sorted."""
        with self._lock:
            return sorted(self._files.keys() - self._received)

    def has(self, uid: str) -> bool:
        """Return whether an object has come."""
        with self._lock:
            return uid in self._received

    @property
    def is_refused(self) -> bool:
        """Return whether the whole series is refused."""
        return self._refused is not None

    def accept(self, content: bytes) -> bool:
        """Write an object, and return whether it was expected.

        A killed process leaves the whole file, or none of its name.
        """
        values = read_values(content)
        file = self._files.get(values["SOPInstanceUID"])
        with self._lock:
            if self._refused is not None:
                raise self._refused
            if file is None:
                return False
            try:
                self._bounds.check(values, len(content))
            except ObjectRefused as error:
                self._refused = error
                raise
            if values["SOPInstanceUID"] in self._received:
                return True
            unfinished = file.with_suffix(".part")
            unfinished.write_bytes(content)
            os.replace(unfinished, file)
            self._received.add(values["SOPInstanceUID"])
        self._on_instance()
        return True

    def files(self, failure: Failure) -> list[Path]:
        """Return the files, sorted."""
        if self._refused is not None:
            raise self._refused
        if missing := len(self.missing):
            reason = f" ({failure.reason})" if failure.reason else ""
            raise FetchError(
                f"{missing} of {len(self._files)} objects did not come{reason}", timed_out=failure.timed_out
            )
        return sorted(self._files.values())
