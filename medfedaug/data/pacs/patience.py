"""`Patience`: when an archive that does not answer is given up."""

from __future__ import annotations

import threading

from medfedaug.data.pacs.archive import ArchiveError, FetchError, OddAnswer, RequestRefused

_MOST = 3


class Patience:
    """Tell failures of one study from an archive that is gone.

    An archive is given up when it was silent to so many studies in a row that each cost its time-outs; one
    that never answered, at once; and one that never answered but with what nobody can use, after as many.
    Safe to be used by several threads.

    Args:
        answered: whether it has answered before.
    """

    def __init__(self, place: str, *, answered: bool = False) -> None:
        self._place, self._answered = place, answered
        self._silent = self._odd = 0
        self._lock = threading.Lock()

    def heard(self) -> None:
        """Note that the archive answers."""
        with self._lock:
            self._answered, self._silent = True, 0

    def problem(self, error: ArchiveError | FetchError) -> str:
        """Return the reason why a study failed."""
        if not error.timed_out:
            if isinstance(error, ArchiveError) and not isinstance(error, RequestRefused):
                raise error
            if isinstance(error, OddAnswer) and not self._answered:
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
