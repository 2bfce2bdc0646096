"""A file is the old one or the new one, whole, whatever happens while it is written."""

import errno
import os
import stat

import pytest
import torch

from medfedaug.errors import MedFedAugError, StorageError
from medfedaug.federation.server.output import write_json, write_state
from medfedaug.statistics import ChannelStatistics, save_statistics
from medfedaug.utils import files
from medfedaug.utils.files import parse_json, write_atomic

WRITERS = {
    "checkpoint": lambda path, n: write_state(path, {"weight": torch.full((200_000,), float(n))}),
    "results": lambda path, n: write_json(path, {"round": n}),
    "statistics": lambda path, n: save_statistics(path, {"A": ChannelStatistics([float(n)], [1.0], 1)}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path, request, writer):
    path = tmp_path / "kept"
    WRITERS[writer](path, 1)
    before = path.read_bytes()
    request.getfixturevalue("full_disk")
    with pytest.raises(StorageError) as caught:
        WRITERS[writer](path, 2)
    assert str(caught.value).startswith(f"{path}: cannot be written: the disk is full.")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, MedFedAugError)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("when", ["fsync", "replace"])
def test_a_failure_at_the_last_moment_leaves_the_old_file(tmp_path, monkeypatch, when):
    path = tmp_path / "kept"
    write_atomic(path, lambda file: file.write(b"old"))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.os, when, fail)
    with pytest.raises(StorageError, match=r"kept: cannot be written: Input/output error"):
        write_atomic(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_a_writers_own_mistake_is_not_hidden_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "kept"
    write_atomic(path, lambda file: file.write(b"old"))
    with pytest.raises(ZeroDivisionError):
        write_atomic(path, lambda file: file.write(b"half") and 1 / 0)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_what_others_may_not_read_stays_so(tmp_path):
    path = tmp_path / "settings.json"
    path.touch(0o600)
    write_json(path, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('[{"b": {"c": 1, "c": 1}}]', "'c' occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested more than 100 deep"),
        ("{", "Expecting"),
    ],
)
def test_json_says_everything_once(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)
    assert parse_json('{"a": {"b": [1, 2]}}') == {"a": {"b": [1, 2]}}
