"""Records that somebody else has written, and values that nobody means: one line each, and no traceback."""

import json
import re
import shutil
from contextlib import suppress

import pytest
from changed_records import SEEDS, changes
from finished_runs import simulated

from medfedaug.errors import ConfigError
from medfedaug.runs.load_results import check_record
from medfedaug.runs.recorded_run import RecordedRun


@pytest.fixture(scope="module")
def made(phantom_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("crafted") / "run"
    return simulated(phantom_dir, out, "fedrdn,fedfd", "--network", "unet", "--limit", 1)


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("seed", SEEDS)
def test_changed_statistics_are_used_or_refused(made, tmp_path, seed):
    folder = shutil.copytree(made, tmp_path / "run")
    record = json.loads((folder / "results.json").read_text())
    del record["sha256"]["statistics.json"]
    (folder / "results.json").write_text(json.dumps(record))
    content = json.loads((folder / "statistics.json").read_text())
    for _, changed in changes(content, f"statistics.json {seed}"):
        (folder / "statistics.json").write_text(json.dumps(changed))
        with suppress(ConfigError):  # any other exception fails the test
            _ = RecordedRun.open(folder).statistics


@pytest.mark.parametrize("seed", SEEDS)
def test_a_changed_record_is_used_or_refused_in_one_line(run, made, tmp_path, seed):
    folder = shutil.copytree(made, tmp_path / "run")
    content = json.loads((folder / "results.json").read_text())
    for path, changed in changes(content, f"results.json {seed}"):
        (folder / "results.json").write_text(json.dumps(changed))
        code, _, err = run(
            "report", folder, "--card", "--out", tmp_path / "card"
        )  # any other exception fails the test
        assert code in (0, 2), path
        if code == 2:
            assert "medfedaug: " in err, path
            assert len(err.strip().splitlines()[-1]) < 600, path


FAULTS = {
    "a text as the test": (("test",), "x"),
    "a score of hundreds of digits": (("test", "mean", "dice"), 10**400),
    "no method": (("config", "methods"), []),
    "a number as the patterns of frozen entries": (("config", "freeze"), 1),
}


# All commands read a record with one function.
OTHERS = [(name, "no method") for name in ("evaluate", "predict", "bundle")] + [
    ("report", "a text as the test")
]


@pytest.mark.parametrize(("command", "fault"), [*(("report --card", fault) for fault in FAULTS), *OTHERS])
def test_a_crafted_record_is_refused_by_every_command(run, made, phantom_dir, tmp_path, command, fault):
    folder = shutil.copytree(made, tmp_path / "run")
    record = json.loads((folder / "results.json").read_text())
    path, value = FAULTS[fault]
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / "results.json").write_text(json.dumps(record))
    out = tmp_path / "out"
    arguments = {
        "evaluate": ("--model", folder, "--data", phantom_dir, "--out", out),
        "predict": ("--model", folder, "--images", phantom_dir / "site_A", "--out", out),
        "bundle": (folder, "--out", out, "--site", "site_A"),
        "report --card": (folder, "--card"),
        "report": (folder, "--out", tmp_path / "page.html"),
    }[command]
    err = run.refused(command.split()[0], *arguments)
    assert "results.json" in err
    assert "medfedaug: " in err


@pytest.mark.parametrize("text", ["{", nested(100_000), '{"a": 1, "a": 2}'])
def test_a_text_that_is_no_record_is_refused(run, made, tmp_path, text):
    folder = shutil.copytree(made, tmp_path / "run")
    (folder / "results.json").write_text(text)
    err = run.refused("report", folder, "--card")
    assert "results.json" in err


ROW = [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"spacing": []}, "spacing is [], expected an object"),
        ({"spacing": {"A": {"low": ROW, "median": ROW}}}, "an object with high"),
        ({"spacing": {"A": {"low": ROW, "median": ROW, "high": [1.0]}}}, "a list of 3"),
        ({"spacing": {"A": {"low": ROW, "median": ROW, "high": [1.0, 2.0, None]}}}, "a finite number"),
        ({"planned": {"fingerprints": {"A": {}}}}, "an object with spacing"),
        ({"planned": {"fingerprints": {"A": {"spacing": [ROW, ROW], "intensity": []}}}}, "a list of 3"),
        ({"planned": {"fingerprints": {"A": {"spacing": [ROW] * 3, "intensity": [[1]]}}}}, "a list of 2"),
    ],
)
def test_odd_spacings_are_refused_in_one_line(changed, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        check_record(changed)
