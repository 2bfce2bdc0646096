"""`Patience`: decide when to give up an archive that does not answer."""

import threading

from medfedaug.hospital.pacs.archive import ArchiveError, FetchError, RequestRefused, UnusableAnswer

_MOST = 3


class Patience:
    """Distinguish failures of one study from an archive that is gone.

    An archive is given up after three silent studies in a row. One that has never ``answered`` is given up at
    once, and after three unusable answers. Several threads may use it.
    """

    def __init__(self, place: str, *, answered: bool = False) -> None:
        self._place, self._answered = place, answered
        self._silent = self._odd = 0
        self._lock = threading.Lock()

    def heard(self) -> None:
        """Record that the archive answers."""
        with self._lock:
            self._answered, self._silent = True, 0

    def problem(self, error: ArchiveError | FetchError) -> str:
        """Return the reason why a study failed; raise where the archive is given up."""
        if not error.timed_out:
            if isinstance(error, ArchiveError) and not isinstance(error, RequestRefused):
                raise error
            if isinstance(error, UnusableAnswer) and not self._answered:
                with self._lock:
                    self._odd += 1
                    if self._odd >= _MOST:
                        raise error
                return str(error)
            self.heard()
            return str(error)
        with self._lock:
            self._silent += 1
            if not self._answered:
                raise error
            if self._silent >= _MOST:
                raise ArchiveError(
                    f"{self._place} does not answer; run the same command again to go on", timed_out=True
                ) from error
        return str(error)
