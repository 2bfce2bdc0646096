"""A run is continued with the files that it began with, or not at all; files have the modes of the umask."""

import json
import os
import shutil

import numpy as np
import pytest
from benchmark_files import write_volume

from medfedaug.errors import DataError
from medfedaug.simulate import simulate


class Stopped(Exception):
    pass


def stop(event):
    if event["event"] == "round_started" and event["round"] == 2:
        raise Stopped


@pytest.fixture
def interrupted(make_site, tmp_path, tiny_config):
    """A run over three small sites that was killed in its second round: how to continue it."""
    for name in "ABC":
        make_site(name, shape=(16, 16, 4))
    data, out = tmp_path / "data", tmp_path / "out"
    options = {"engine": "inprocess", "device": "cpu", "report": False}
    with pytest.raises(Stopped):
        simulate(data, out, tiny_config(), on_event=stop, **options)
    return lambda: simulate(data, out, tiny_config(), resume=True, **options)


def test_a_run_whose_files_are_as_they_were_is_continued_and_keeps_no_list_of_them(interrupted, tmp_path):
    kept = json.loads((tmp_path / "out/state/server/data.json").read_text())["files"]
    assert sorted(kept) == ["A", "B", "C"]
    for file in (tmp_path / "data").rglob("*.nii.gz"):
        os.utime(file, (0, 0))  # as a copy has another time, and nothing else
    assert len(interrupted()["rounds"]) == 2
    assert not (tmp_path / "out/state").exists()


def correct(split):
    def change(data):
        content = json.loads((data / "B/dataset.json").read_text())
        corrected = np.zeros((16, 16, 4), np.uint8)
        corrected[4:9, 4:9, 2] = 1
        write_volume(data / "B" / content[split][0]["label"], corrected)

    return change


def leave_out(data):
    listing = data / "A/dataset.json"
    content = json.loads(listing.read_text())
    content["training"].pop()
    listing.write_text(json.dumps(content))


def remove(data):
    shutil.rmtree(data / "C")


def add(data):
    shutil.copytree(data / "A", data / "D")


CHANGES = {
    "site B, .*B: has other files since the run began": correct("training"),
    "site C, .*data/C: is not there since the run began": remove,
    "site A, .*A: has other files since the run began": leave_out,
    "site D, .*data/D: is new since the run began": add,
}


def test_a_run_is_not_continued_with_other_files(interrupted, tmp_path):
    shutil.copytree(tmp_path / "data", tmp_path / "kept")
    before = sorted(path for path in (tmp_path / "out").rglob("*"))
    for reason, change in CHANGES.items():
        change(tmp_path / "data")
        with pytest.raises(DataError, match=reason):
            interrupted()
        assert sorted(path for path in (tmp_path / "out").rglob("*")) == before
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "kept", tmp_path / "data")


def move_to_the_test(data):
    listing = data / "B/dataset.json"
    content = json.loads(listing.read_text())
    content["test"].append(content["training"].pop())
    listing.write_text(json.dumps(content))


OTHER_FILES = r"site B, .*data/B: has other files since the finished run in .*out was made"
SINCE_IT_WAS_MADE = [
    (correct("test"), OTHER_FILES),
    (move_to_the_test, OTHER_FILES),
    (remove, r"site C, .*data/C: is not there since"),
]


def test_a_finished_run_is_the_run_of_its_files_and_no_others(interrupted, tmp_path):
    results, path = interrupted(), tmp_path / "out/results.json"
    before = path.read_bytes()
    for file in (tmp_path / "data").rglob("*.nii.gz"):
        os.utime(file, (0, 0))
    assert interrupted() == results
    shutil.copytree(tmp_path / "data", tmp_path / "kept")
    for change, reason in SINCE_IT_WAS_MADE:
        change(tmp_path / "data")
        with pytest.raises(DataError, match=reason):
            interrupted()
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "kept", tmp_path / "data")
    assert path.read_bytes() == before


def one_line(run, *arguments) -> str:
    code, _, err = run(*arguments)
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith("medfedaug: ")
    return line


SIMULATE = ("simulate", "--methods", "fedavg", "--rounds", 1, "--engine", "inprocess", "--device", "cpu")
SIMULATE += ("--no-report",)


def test_a_record_that_is_none_ends_in_one_line(make_site, run, tmp_path):
    make_site("A"), make_site("B")
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text(json.dumps({"config": {"methods": 5}, "rounds": [], "test": {}}))
    reason = "results.json is damaged: config.methods is 5"
    assert reason in one_line(run, *SIMULATE, "--data", tmp_path / "data", "--out", out, "--resume")
    assert [path.name for path in out.iterdir()] == ["results.json"]
