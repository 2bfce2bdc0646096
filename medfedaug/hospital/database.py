"""`Database`: an SQLite file of a site, which exists whole or not at all, and by which jobs take turns."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from filelock import FileLock

from medfedaug.errors import translated
from medfedaug.utils.files import PRIVATE, make_private, private_folder


class Database:
    """Tables of a site, in a file that only its owner may read, or in memory without a path.

    ``unusable`` makes the error of a file that cannot be used, or is none of this version.
    """

    def __init__(
        self,
        path: str | Path | None,
        tables: str,
        version: int,
        unusable: Callable[[Path, Exception], Exception],
    ) -> None:
        self.path = Path(path) if path is not None else None
        self._lock = FileLock(f"{self.path}.lock") if self.path is not None else nullcontext()
        self._script = f"BEGIN; {tables} PRAGMA user_version = {version}; COMMIT;"
        self._version, self._unusable = version, unusable
        self._memory: sqlite3.Connection | None = None
        if self.path is None:
            self._memory = sqlite3.connect(":memory:", check_same_thread=False)
            self._memory.executescript(self._script)

    def held(self) -> AbstractContextManager[object]:
        """Keep other jobs out between a query and the entry that depends on it."""
        if self.path is not None:
            private_folder(self.path.parent)
        return self._lock

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Open the tables for a transaction."""
        if self._memory is not None:
            with self._memory:
                yield self._memory
            return
        assert self.path is not None
        unusable = partial(self._unusable, self.path)
        with self.held(), translated(OSError, sqlite3.Error, to=unusable):
            if not self.path.exists():
                self._create(self.path)
            make_private(self.path)
            with closing(sqlite3.connect(self.path)) as connection, connection:
                ((version,),) = connection.execute("PRAGMA user_version")
                if version != self._version:  # 0 of an empty file
                    raise sqlite3.DatabaseError(f"its version is {version}, not {self._version}")
                yield connection

    def _create(self, path: Path) -> None:
        """Create the file whole: on a full disk, a part could be mistaken for an empty account."""
        fresh = path.with_name(f".{path.name}.new")
        fresh.unlink(missing_ok=True)
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE))
        try:
            make_private(fresh)
            with closing(sqlite3.connect(fresh)) as connection:
                connection.executescript(self._script)
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
