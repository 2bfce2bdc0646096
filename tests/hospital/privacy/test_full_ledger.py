"""A disk that is full is called so, and the ledger keeps what it had."""

import sqlite3

import pytest

from medfedaug.errors import ConfigError, StorageError
from medfedaug.hospital.privacy.ledger import PrivacyLedger, Release


@pytest.fixture
def ledger(tmp_path):
    found = PrivacyLedger(tmp_path / "ledger.sqlite")
    found.enter([Release("job", "model", "weights", "1 MB")])
    return found


@pytest.fixture
def full(monkeypatch):
    """SQLite has as many pages as there are, and not one more: its own error of a full disk follows."""
    real = sqlite3.connect

    def connect(*arguments, **more):
        connection = real(*arguments, **more)
        ((pages,),) = connection.execute("PRAGMA page_count")
        connection.execute(f"PRAGMA max_page_count = {max(pages, 1)}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)
    return monkeypatch


def test_sqlites_full_disk_is_told_as_one_and_nothing_is_lost(ledger, full):
    with pytest.raises(StorageError, match=r"ledger\.sqlite: cannot be written: the disk is full"):
        ledger.enter([Release("job", "model", "weights", "x" * 100_000)])
    full.undo()
    assert [entry.release.shape for entry in ledger.entries()] == ["1 MB"]


def test_a_disk_that_is_full_when_a_ledger_begins_leaves_nothing_unreadable(tmp_path, full):
    account = PrivacyLedger(tmp_path / "ledger.sqlite")
    with pytest.raises(StorageError, match="the disk is full"):
        account.releases()
    full.undo()
    assert account.releases() == []


def test_a_ledger_of_another_version_is_refused(ledger):
    with sqlite3.connect(ledger.path) as connection:
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match="its version is 7, not 1"):
        ledger.entries()
