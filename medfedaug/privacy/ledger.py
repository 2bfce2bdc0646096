"""`PrivacyLedger`: everything that a site has released, and its spent privacy budget."""

from __future__ import annotations

import errno
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from medfedaug.errors import ConfigError, MedFedAugError, StorageError, own
from medfedaug.privacy.accountant import Spent, epsilon_spent
from medfedaug.utils.files import PRIVATE, make_private, private_folder

__all__ = ["LEDGER_FILE", "Entry", "Nearest", "PrivacyLedger", "Release", "Scored", "by_kind"]

LEDGER_FILE = "ledger.sqlite"
"""File of the ledger in a site's state folder."""

_SCHEMA = 1
_TABLES = """
CREATE TABLE account (identifier TEXT);
INSERT INTO account VALUES (LOWER(HEX(RANDOMBLOB(16))));
CREATE TABLE files (files BLOB PRIMARY KEY, identity BLOB) WITHOUT ROWID;
CREATE TABLE members (cases TEXT, identity BLOB, PRIMARY KEY (cases, identity)) WITHOUT ROWID;
CREATE TABLE patients (identity BLOB PRIMARY KEY, patient BLOB) WITHOUT ROWID;
CREATE TABLE spent (time REAL, noise REAL, releases INTEGER, cases TEXT, rate REAL);
CREATE TABLE releases (
    number INTEGER PRIMARY KEY, time REAL, job TEXT, method TEXT, kind TEXT, shape TEXT, split TEXT,
    count INTEGER, noise REAL, digest TEXT, queries INTEGER, cases TEXT, site TEXT
);
CREATE INDEX by_cases ON releases (split, cases);
CREATE TABLE scored (
    job TEXT, split TEXT, cases TEXT, model TEXT, place TEXT, known INTEGER, answer TEXT, time REAL, site TEXT
);
CREATE INDEX by_model ON scored (model, split, cases);
CREATE TABLE models (model TEXT PRIMARY KEY, job TEXT, time REAL) WITHOUT ROWID;
"""
"""Among them the account's identifier, and the identity of a case by the hash of its files."""

_TIMED = ("releases", "spent", "scored", "models")  # the tables whose rows have a time

_OWNER = "COALESCE(patient, identity)"
"""The patient of a case; a case without a named patient counts as a patient."""

_OF_PATIENTS = f"""
SELECT DISTINCT cases FROM members LEFT JOIN patients USING (identity) WHERE {_OWNER} IN
    (SELECT {_OWNER} FROM members LEFT JOIN patients USING (identity) WHERE cases = ?)
"""
"""The sets that share a patient with a given set."""


@dataclass(frozen=True)
class Release:
    """Release of a site: values that leave it.

    Args:
        job: the identifier of the job.
        method: the method that sends it; ``"model"`` for weights, ``"task"`` for scores and counts,
            ``"masks"`` for keys and shares of secure aggregation.
        kind: ``"weights"``, ``"statistics"``, ``"masked weights and statistics"``, ``"numbers"``,
            ``"scores"``, ``"message"``, or the kind of key or share.
        shape: a short description of the content.
        split: the split of its cases, ``"training"``, ``"validation"`` or ``"test"``; empty for no cases.
        count: the number of these cases.
        noise: the noise multiplier; 0 without noise.
        digest: SHA-256 of the content.
        queries: the number of models whose scores it has.
        site: the site's name in the job.
    """

    job: str
    method: str
    kind: str
    shape: str
    split: str = ""
    count: int = 0
    noise: float = 0.0
    digest: str = ""
    queries: int = 0
    site: str = ""


@dataclass(frozen=True)
class Entry:
    """Release in the ledger: its number from 1, its time in seconds since 1970, and the hash of its cases."""

    number: int
    time: float
    release: Release
    cases: str


@dataclass(frozen=True)
class Nearest:
    """Earlier release with the most similar cases; ``apart`` counts the patients who differ."""

    apart: int
    job: str
    time: float


@dataclass(frozen=True)
class Scored:
    """Model whose scores on ``"validation"`` or ``"test"`` cases have left the site, or are about to.

    ``model`` is a hash of everything but the cases that determines the scores. ``place`` is their place in
    the job, ``"round 3"`` or ``"test"``; empty in an evaluation. ``known`` says that the site met the model
    in a training job. ``answer`` is the reply that has left, to be repeated unchanged; empty where the scores
    were exact.
    """

    job: str
    split: str
    model: str
    place: str = ""
    known: bool = True
    answer: str = ""
    site: str = ""


class PrivacyLedger:
    """The account of everything that a site has released, over all of its jobs, restarts and names.

    Cases are known by their identities (`medfedaug.data.quality.content_hash.case_identities`), so that an
    account continues when a site, its folder or its files are renamed. Every method that takes identities
    also takes a mapping from the identities of cases to the identities of their patients; the latest mapping
    holds. The cases of a patient then share one budget, and count as one where sets of cases are compared.

    Sites may share an account, since a budget belongs to patients. The limits of a job apply to each site.
    The account is an SQLite file, with a lock file by which jobs take turns; without a path it is in memory,
    for a simulation.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self._lock = FileLock(f"{self.path}.lock") if self.path is not None else nullcontext()
        self._memory: sqlite3.Connection | None = None
        if self.path is None:
            self._memory = sqlite3.connect(":memory:", check_same_thread=False)
            _make(self._memory)

    def identities(self, files: Mapping[bytes, Callable[[], bytes]]) -> dict[bytes, bytes]:
        """Return the identities under which cases are entered; see `IdentityStore`."""
        with self._opened() as connection:
            known = dict(connection.execute("SELECT files, identity FROM files"))
        # Decoding takes long, and other jobs wait for an opened ledger.
        new = {key: decode() for key, decode in files.items() if key not in known}
        with self._opened() as connection:
            connection.executemany("INSERT OR IGNORE INTO files VALUES (?, ?)", new.items())
        return {key: known[key] if key in known else new[key] for key in files}

    def account(self) -> tuple[str, int]:
        """Return the account's identifier, which never changes, and the number of its entries."""
        with self._opened() as connection:
            ((identifier,),) = connection.execute("SELECT identifier FROM account")
            counts = " + ".join(f"(SELECT COUNT(*) FROM {table})" for table in _TIMED)
            ((entries,),) = connection.execute(f"SELECT {counts}")
        return str(identifier), int(entries)

    def held(self) -> AbstractContextManager[object]:
        """Keep other jobs out between a query and the entry that depends on it."""
        if self.path is not None:
            private_folder(self.path.parent)
        return self._lock

    def releases(self, cases: Collection[bytes] = ()) -> list[Spent]:
        """Return the releases with noise so far, all or those about the patients of some cases.

        Raises:
            ConfigError: for a file that is not a ledger: the spent budget is unknown, and nothing may leave.
        """
        with self._opened() as connection:
            return _spent(connection, cases)

    def spend(
        self,
        noise_multiplier: float,
        delta: float,
        max_epsilon: float,
        cases: Collection[bytes] = (),
        releases: int = 1,
        rate: float = 1.0,
    ) -> float | None:
        """Enter more releases with noise, before anything leaves the site: a crash in between costs budget.

        Cases are their identities; empty for unknown cases, which count with all others.

        Returns:
            ε of all releases about these cases' patients together; ``None``, with nothing entered, where it
            would exceed ``max_epsilon``.
        """
        with self._opened() as connection:
            earlier, more = _spent(connection, cases), Spent(noise_multiplier, releases, rate)
            epsilon = epsilon_spent([*earlier, more], delta)
            if not epsilon <= max_epsilon:
                return None
            row = (_now(connection), noise_multiplier, releases, _enter_cases(connection, cases), rate)
            connection.execute("INSERT INTO spent VALUES (?, ?, ?, ?, ?)", row)
            return epsilon

    def enter(self, releases: Iterable[Release], cases: Collection[bytes] = ()) -> None:
        """Enter releases that are about to leave, with the identities of their cases."""
        with self._opened() as connection:
            digest, now = _enter_cases(connection, cases), _now(connection)
            for r in releases:
                row = (r.job, r.method, r.kind, r.shape, r.split, r.count, r.noise, r.digest, r.queries)
                connection.execute(
                    "INSERT INTO releases VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (now, *row, digest, r.site),
                )

    def nearest(self, split: str, cases: Collection[bytes]) -> Nearest | None:
        """Return the earlier release without noise, of the same split, with the most similar cases.

        Two sets differ by the patients whose cases differ, or whose number of cases differs, whichever is
        fewer: files that hold nearly the same image are different cases of one patient. A case without a
        named patient counts as a patient.
        """
        with self._opened() as connection:
            digest = _enter_cases(connection, cases)
            rows = connection.execute(
                f"""
                SELECT set_.cases, r.job, MAX(r.time)
                FROM ({_OF_PATIENTS}) set_ JOIN releases r ON r.cases = set_.cases AND r.split = ?
                WHERE set_.cases != ? AND r.noise = 0 GROUP BY set_.cases
                """,
                (digest, split, digest),
            ).fetchall()
            near = [Nearest(_apart(connection, digest, other), job, when) for other, job, when in rows]
        return min(near, key=lambda entry: entry.apart, default=None)

    def queries(self, split: str, cases: Collection[bytes], since: float = 0.0) -> int:
        """Count the models whose scores on any case of these cases' patients were released since a time."""
        with self._opened() as connection:
            digest = _enter_cases(connection, cases)
            ((count,),) = connection.execute(
                f"""
                SELECT COALESCE(SUM(queries), 0) FROM releases
                WHERE split = ? AND time >= ? AND cases IN ({_OF_PATIENTS})
                """,
                (split, since, digest),
            )
        return int(count)

    def score(self, scored: Scored, cases: Collection[bytes]) -> None:
        """Enter a model whose scores on these cases are about to leave."""
        with self._opened() as connection:
            s, digest = scored, _enter_cases(connection, cases)
            row = (s.job, s.split, digest, s.model, s.place, s.known, s.answer, _now(connection), s.site)
            connection.execute("INSERT INTO scored VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def scored(self, split: str, model: str, cases: Collection[bytes]) -> Scored | None:
        """Return the first release of a model's scores on exactly these cases."""
        with self._opened() as connection:
            values = split, model, _enter_cases(connection, cases)
            rows = _scored(connection, "split = ? AND model = ? AND cases IS ?", values)
        return rows[0] if rows else None

    def scored_in(self, job: str, split: str, site: str) -> list[Scored]:
        """List the models whose scores have left a site in a job."""
        with self._opened() as connection:
            return _scored(connection, "job = ? AND site = ? AND split = ?", (job, site, split))

    def meet(self, models: Iterable[str], job: str) -> None:
        """Enter models that the site received or trained in a training job, by their hashes."""
        with self._opened() as connection:
            now = _now(connection)
            rows = [(model, job, now) for model in models]
            connection.executemany("INSERT OR IGNORE INTO models VALUES (?, ?, ?)", rows)

    def met(self, model: str) -> bool:
        """Return whether the site received or trained a model in a training job."""
        with self._opened() as connection:
            row = connection.execute("SELECT 1 FROM models WHERE model = ?", (model,)).fetchone()
        return row is not None

    def updates(self, job: str, site: str, *, failed: bool = False) -> int:
        """Count a site's models and failed answers that have left in a job, or the failed answers alone."""
        where = "job = ? AND site = ? AND method = 'model'" + " AND kind = 'message'" * failed
        with self._opened() as connection:
            ((count,),) = connection.execute(f"SELECT COUNT(*) FROM releases WHERE {where}", (job, site))
        return int(count)

    def entries(self) -> list[Entry]:
        """List all releases, the oldest first."""
        with self._opened() as connection:
            rows = connection.execute(
                """
                SELECT number, time, cases,
                    job, method, kind, shape, split, count, noise, digest, queries, site
                FROM releases ORDER BY number
                """
            ).fetchall()
        return [Entry(number, when, Release(*rest), cases) for number, when, cases, *rest in rows]

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        if self._memory is not None:
            with self._memory:
                yield self._memory
            return
        assert self.path is not None
        with self.held():
            try:
                if not self.path.exists():
                    _create(self.path)
                elif not self.path.stat().st_size:
                    raise ValueError("it is empty")
                make_private(self.path)
                with closing(sqlite3.connect(self.path)) as connection, connection:
                    ((schema,),) = connection.execute("PRAGMA user_version")
                    if schema != _SCHEMA:
                        raise ValueError(f"it has schema {schema}, this version reads schema {_SCHEMA}")
                    yield connection
            except (OSError, ValueError, sqlite3.Error) as error:
                raise _unreadable(self.path, error) from error


def by_kind(entries: Iterable[Entry]) -> list[tuple[Entry, Entry, int]]:
    """Return the first and the last release of each kind of a site in each job, with their number."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        r = entry.release
        groups.setdefault((r.job, r.site, r.method, r.kind, r.shape, r.split, entry.cases), []).append(entry)
    return [(group[0], group[-1], len(group)) for group in groups.values()]


def _create(path: Path) -> None:
    """Create a ledger whole: on a full disk, a partial file could be mistaken for an empty account."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE))
    try:
        make_private(fresh)
        with closing(sqlite3.connect(fresh)) as connection, connection:
            _make(connection)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _make(connection: sqlite3.Connection) -> None:
    connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_SCHEMA}; COMMIT;")


def _now(connection: sqlite3.Connection) -> float:
    """Return the time, never before an earlier entry's: a clock that was set back would hide entries."""
    times = " UNION ALL ".join(f"SELECT MAX(time) AS latest FROM {table}" for table in _TIMED)
    ((last,),) = connection.execute(f"SELECT COALESCE(MAX(latest), 0) FROM ({times})")
    return max(time.time(), float(last))


def _enter_cases(connection: sqlite3.Connection, cases: Collection[bytes]) -> str | None:
    """Enter the members of a set of cases, and their patients where known; return the set's hash."""
    if not cases:
        return None
    members = sorted(set(cases))
    digest = hashlib.sha256(b"".join(members)).hexdigest()
    connection.executemany("INSERT OR IGNORE INTO members VALUES (?, ?)", ((digest, m) for m in members))
    if isinstance(cases, Mapping):
        connection.executemany("INSERT OR REPLACE INTO patients VALUES (?, ?)", cases.items())
    return digest


def _apart(connection: sqlite3.Connection, first: str | None, second: str) -> int:
    """Count the patients by whom two sets differ: see `PrivacyLedger.nearest`."""
    counts = connection.execute(
        f"""
        SELECT SUM(cases = ?), SUM(cases = ?), COUNT(*) - 2 * (COUNT(*) - COUNT(DISTINCT identity))
        FROM members LEFT JOIN patients USING (identity) WHERE cases IN (?, ?) GROUP BY {_OWNER}
        """,
        (first, second, first, second),
    ).fetchall()
    in_number = sum(a != b for a, b, _ in counts)
    in_cases = sum(bool(alone) for *_, alone in counts)
    return min(in_number, in_cases) if in_number else in_cases


def _spent(connection: sqlite3.Connection, cases: Collection[bytes]) -> list[Spent]:
    related, values = "", tuple[str | None, ...]()
    if cases:
        related = f"WHERE cases IS NULL OR cases IN ({_OF_PATIENTS})"
        values = (_enter_cases(connection, cases),)
    rows = connection.execute(
        f"SELECT noise, SUM(releases), rate FROM spent {related} GROUP BY noise, rate ORDER BY MIN(rowid)",
        values,
    )
    return [Spent(float(noise), int(count), float(rate)) for noise, count, rate in rows]


def _scored(connection: sqlite3.Connection, where: str, values: tuple[str | None, ...]) -> list[Scored]:
    columns = "job, split, model, place, known, answer, site"
    rows = connection.execute(f"SELECT {columns} FROM scored WHERE {where} ORDER BY rowid", values)
    return [
        Scored(job, split, model, place, bool(known), answer, site)
        for job, split, model, place, known, answer, site in rows
    ]


def _unreadable(path: Path, error: Exception) -> MedFedAugError:
    # SQLite's message; Python 3.10 has no name for the code.
    if isinstance(error, sqlite3.OperationalError) and "is full" in str(error):
        return StorageError(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(path, error)
    return ConfigError(
        f"{own(path)} is not a privacy ledger of this version ({error}): the spent budget is unknown, so "
        "nothing more may leave"
    )
