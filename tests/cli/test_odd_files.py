"""Files that no command can read or write end it with one line, and not with a traceback or never."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def kit(kits) -> Path:
    return kits / "hospital-a"


def refused(result: tuple[int, str, str], words: str) -> None:
    code, _, err = result
    assert code == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_settings_nested_without_end(run, kit, tmp_path):
    file = tmp_path / "deep.json"
    file.write_text('{"privacy":' * 5000 + "1" + "}" * 5000)
    refused(run("site", "configure", kit, "--config", file), "not readable as YAML or JSON")


def test_a_folder_with_a_nul(run, kit, tmp_path):
    file = tmp_path / "nul.json"
    file.write_text(json.dumps({"state": "a\0b"}))
    refused(run("site", "configure", kit, "--config", file), "state must name a folder without a NUL")


def test_a_pipe_is_not_waited_for(run, kit, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused(run("site", "configure", kit, "--config", pipe), "not a file")
    refused(run("enrol", "sign", pipe), "not a file")
