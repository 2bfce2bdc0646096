"""`PrivacyLedger`: everything that a site has released, and its total ε; `AccountMark` binds images to it.

ε is that of Gaussian releases, by Opacus' accountant of Rényi differential privacy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from medfedaug.errors import ConfigError, MedFedAugError, StorageError, config_errors, own
from medfedaug.hospital.database import Database
from medfedaug.utils.files import parse_versioned, version_mark, write_atomic
from medfedaug.utils.plugins import import_extra

if TYPE_CHECKING:
    import numpy as np

    from medfedaug.data.base import SiteFolder


class Spent(NamedTuple):
    """Equal releases with noise; ``rate`` is the probability of a case to take part in each of them."""

    noise: float
    releases: int
    rate: float = 1.0


ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [2**k for k in range(6, 12)]
"""Orders of the Rényi divergence: Opacus' orders, and larger ones for budgets below 1."""


def require_opacus() -> Any:
    """Import Opacus' accountants."""
    return import_extra("opacus.accountants", "privacy", "the account of noise")


def epsilon_spent(releases: Iterable[tuple[float, int] | tuple[float, int, float]], delta: float) -> float:
    """Return the total ε of Gaussian releases, by the accountant.

    Each entry is a noise multiplier with its number of releases and, if these do not use all cases, the
    probability of a case to be in each (`Spent`).

    Returns:
        ε; infinite where a release has no noise, or so little that its square is 0.
    """
    rdp = require_opacus().analysis.rdp
    spent = [Spent(*release) for release in releases]
    if not all(group.noise > 0 and group.noise**2 > 0 for group in spent):
        return math.inf
    divergence = sum(group.releases * _divergence(group.noise, group.rate) for group in spent)
    if isinstance(divergence, int):  # no release
        return 0.0
    return float(rdp.get_privacy_spent(orders=ORDERS, rdp=divergence, delta=delta)[0])


@lru_cache(maxsize=2**10)
def _divergence(noise: float, rate: float) -> np.ndarray:
    """Return the Rényi divergence of one release, at `ORDERS`; a ledger repeats the same calls."""
    rdp = require_opacus().analysis.rdp
    divergence: np.ndarray = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)
    return divergence


__all__ = ["LEDGER_FILE", "Entry", "PrivacyLedger", "Release", "by_kind"]

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
    count INTEGER, noise REAL, digest TEXT, cases TEXT, site TEXT
);
"""
"""Among them the account's identifier, and the identity of a case by the hash of its files."""

_OWNER = "COALESCE(patient, identity)"
"""The patient of a case; a case without a named patient counts as a patient."""

_OF_PATIENTS = f"""
SELECT DISTINCT cases FROM members LEFT JOIN patients USING (identity) WHERE {_OWNER} IN
    (SELECT {_OWNER} FROM members LEFT JOIN patients USING (identity) WHERE cases = ?)
"""
"""The sets that share a patient with a given set."""


@dataclass(frozen=True)
class Release:
    """Release of a site: values that leave it."""

    job: str
    method: str  #: or "model" for weights, "task" for scores and counts, "masks" for keys and shares
    kind: str  #: such as "weights", "statistics", "scores"
    shape: str  #: short description of the content
    split: str = ""  #: of its cases
    count: int = 0  #: of these cases
    noise: float = 0.0  #: noise multiplier
    digest: str = ""  #: SHA-256 of the content
    site: str = ""  #: its name in the job


@dataclass(frozen=True)
class Entry:
    """Release in the ledger: its number from 1, its time in seconds since 1970, and the hash of its cases."""

    number: int
    time: float
    release: Release
    cases: str


class PrivacyLedger(Database):
    """The account of everything that a site has released, over all of its jobs, restarts and names.

    Cases are known by their identities (`medfedaug.hospital.privacy.release_log.case_identities`), so that
    an account continues when a site, its folder or its files are renamed. Every method that takes identities
    also takes a mapping from the identities of cases to the identities of their patients; the latest mapping
    holds. The cases of a patient then share one budget.

    Sites may share an account, since a budget belongs to patients. In a simulation it is in memory.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(path, _TABLES, _SCHEMA, _unreadable)

    def identities(self, files: Mapping[bytes, Callable[[], bytes]]) -> dict[bytes, bytes]:
        """Return identities of cases by hashes of files; functions compute missing ones from voxels."""
        with self.opened() as connection:
            known = dict(connection.execute("SELECT files, identity FROM files"))
        # Decoding takes long, and other jobs wait for an opened ledger.
        new = {key: decode() for key, decode in files.items() if key not in known}
        with self.opened() as connection:
            connection.executemany("INSERT OR IGNORE INTO files VALUES (?, ?)", new.items())
        return {key: known[key] if key in known else new[key] for key in files}

    def account(self) -> tuple[str, int]:
        """Return the account's identifier, which never changes, and the number of its entries."""
        with self.opened() as connection:
            ((identifier,),) = connection.execute("SELECT identifier FROM account")
            ((entries,),) = connection.execute(
                "SELECT (SELECT COUNT(*) FROM releases) + (SELECT COUNT(*) FROM spent)"
            )
        return str(identifier), int(entries)

    def releases(self, cases: Collection[bytes] = ()) -> list[Spent]:
        """Return the releases with noise so far, all or those about the patients of some cases."""
        with self.opened() as connection:
            return _spent(connection, cases)

    def spend(
        self,
        noise_multiplier: float,
        delta: float,
        most: float,
        cases: Collection[bytes] = (),
        releases: int = 1,
        rate: float = 1.0,
    ) -> float | None:
        """Enter more releases with noise, before anything leaves the site: a crash in between costs budget.

        Return ε of all releases about these cases' patients together; ``None``, with nothing entered, where
        it would exceed ``most``. Cases are their identities; unknown cases count with all others.
        """
        with self.opened() as connection:
            earlier, more = _spent(connection, cases), Spent(noise_multiplier, releases, rate)
            epsilon = epsilon_spent([*earlier, more], delta)
            if not epsilon <= most:
                return None
            row = (time.time(), noise_multiplier, releases, _enter_cases(connection, cases), rate)
            connection.execute("INSERT INTO spent VALUES (?, ?, ?, ?, ?)", row)
            return epsilon

    def enter(self, releases: Iterable[Release], cases: Collection[bytes] = ()) -> None:
        """Enter releases that are about to leave, with the identities of their cases."""
        with self.opened() as connection:
            digest, now = _enter_cases(connection, cases), time.time()
            for r in releases:
                row = (r.job, r.method, r.kind, r.shape, r.split, r.count, r.noise, r.digest)
                connection.execute(
                    "INSERT INTO releases VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (now, *row, digest, r.site),
                )

    def entries(self) -> list[Entry]:
        """List all releases, the oldest first."""
        with self.opened() as connection:
            rows = connection.execute(
                """
                SELECT number, time, cases,
                    job, method, kind, shape, split, count, noise, digest, site
                FROM releases ORDER BY number
                """
            ).fetchall()
        return [Entry(number, when, Release(*rest), cases) for number, when, cases, *rest in rows]


def by_kind(entries: Iterable[Entry]) -> list[tuple[Entry, Entry, int]]:
    """Return the first and the last release of each kind of a site in each job, with their number."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        r = entry.release
        groups.setdefault((r.job, r.site, r.method, r.kind, r.shape, r.split, entry.cases), []).append(entry)
    return [(group[0], group[-1], len(group)) for group in groups.values()]


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


_log = logging.getLogger(__name__)

ACCOUNT_MARK = ".medfedaug_account"  # file in a site's data folder

_MARK_KIND = "account_mark", 1


@dataclass(frozen=True)
class AccountMark:
    """Reference from a data folder to the ledger that counts its releases.

    Identifier, number of entries and path are those of the ledger at the last writing of the mark.
    """

    account: str
    entries: int
    ledger: str

    @classmethod
    def read(cls, folder: Path) -> AccountMark | None:
        """Read the mark of a data folder; ``None`` for none."""
        path = folder / ACCOUNT_MARK
        # The images may have an account already.
        remedy = "; restore it, or remove it where nothing has left about these images"
        with config_errors(f"{own(path)}: does not name an account of releases", remedy=remedy):
            text = ""
            with suppress(FileNotFoundError):  # and nothing else: a mark that cannot be read counts
                text = path.read_text(encoding="utf-8")
            if not text:  # a process that was killed before it wrote leaves an empty file
                return None
            content = parse_versioned(text, *_MARK_KIND)
            return cls(content["account"], int(content["entries"]), content["ledger"])

    @classmethod
    def of(cls, ledger: PrivacyLedger) -> AccountMark:
        """Build the current mark of a ledger; a ledger that does not exist yet has no identifier."""
        assert ledger.path is not None
        identifier, entries = ledger.account() if ledger.path.exists() else ("", 0)
        return cls(identifier, entries, str(ledger.path.absolute()))

    def text(self) -> bytes:
        """Return the content of the file."""
        return f"{json.dumps({**version_mark(*_MARK_KIND), **asdict(self)})}\n".encode()


def check_account(ledger: PrivacyLedger, site: SiteFolder) -> AccountMark | None:
    """Check that a site's images have no other account and no newer ledger; return their mark."""
    mark = AccountMark.read(site.path)
    if mark is None:
        return None
    now, path = AccountMark.of(ledger), own(site.path / ACCOUNT_MARK)
    if mark.account != now.account:
        raise ConfigError(
            f"releases about these images are counted in another ledger, {own(mark.ledger)}, and a second "
            "one would be a second budget for the same patients. Name that state folder with site configure "
            f"--state; or, if that ledger is lost, remove {path}, which begins a new budget"
        )
    if mark.entries > now.entries:
        raise ConfigError(
            f"the ledger {own(now.ledger)} has {now.entries} entries and had {mark.entries} before: it is an "
            f"older copy. Restore the newer one; or, if it is lost, remove {path}, which counts from the copy"
        )
    return mark


def bind_account(ledger: PrivacyLedger, site: SiteFolder) -> None:
    """Bind a site's images to an account: a second account would be a second budget for their patients.

    The number of entries in the mark reveals an older copy of the ledger. A folder that cannot be written
    keeps its mark. Published images have no budget, and get no mark.
    """
    if ledger.path is None or site.published:
        return
    check_account(ledger, site)  # before a new ledger begins
    with ledger.held():
        ledger.account()  # begins a new ledger
        mark, path = check_account(ledger, site), site.path / ACCOUNT_MARK
        now = AccountMark.of(ledger)
        try:
            if mark is None and not path.exists():
                # Two kits that begin at the same time have different locks.
                with path.open("xb") as file:
                    file.write(now.text())
            elif mark != now:
                write_atomic(path, lambda file: file.write(now.text()))
        except FileExistsError:
            check_account(ledger, site)
        except (OSError, StorageError) as error:
            _log.warning("the images do not name their account of releases: %s", error)
