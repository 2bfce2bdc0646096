"""Commands that were asked for something else than what they would do, or for files of odd kinds, say so."""

import json
import os

import pytest
from running import TINY_OPTIONS

from medfedaug.statistics import load_statistics


def test_statistics_replace_no_file_unless_they_may(run, phantom_dir, tmp_path):
    target = tmp_path / "notes.json"
    target.write_text('{"mine": 1}')
    command = ("statistics", "--data", phantom_dir / "site_A", "--limit", 1, "--out", target)
    code, _, err = run(*command)
    assert (code, "choose another file with --out" in " ".join(err.split())) == (2, True)
    assert target.read_text() == '{"mine": 1}'
    run.ok(*command, "--overwrite")
    assert load_statistics(target)["site_A"].count == 1


@pytest.mark.parametrize("methods", ["fedfa", "mixup", "fedavg"])
def test_batches_of_one_image_are_named_where_a_method_needs_more(run, make_site, tmp_path, methods):
    for name in "AB":
        make_site(name, shape=(32, 32, 4))
    out = tmp_path / "out"
    code, _, err = run(
        *("simulate", "--data", tmp_path / "data", "--out", out, "--methods", methods, "--rounds", 1),
        *("--batch-size", 1, "--engine", "inprocess", "--device", "cpu", "--threads", 1, "--no-report"),
        *TINY_OPTIONS,
    )
    assert code == 0, err
    said = " ".join(err.split())
    words = f"warning: {methods}: nothing happens with a batch of one image"
    assert said.count(words) == (methods != "fedavg")
    if methods == "fedfa":
        assert said.count("FFA layers do nothing with a batch of one image") == 1
        sites = json.loads((out / "results.json").read_text())["rounds"][0]["sites"].values()
        assert all(site["fedfa/negative_std"] == 0 for site in sites)


def test_files_that_cannot_be_read_end_a_command_with_one_line_and_not_never(run, kits, tmp_path):
    deep, nul, pipe = (tmp_path / name for name in ("deep.json", "nul.json", "pipe"))
    deep.write_text('{"privacy":' * 5000 + "1" + "}" * 5000)
    nul.write_text(json.dumps({"state": "a\0b"}))
    os.mkfifo(pipe)
    configure = ("site", "configure", kits / "hospital-a", "--config")
    for command, words in (
        ((*configure, deep), "not readable as YAML or JSON"),
        ((*configure, nul), "state must name a folder without a NUL"),
        ((*configure, pipe), "not a file"),
        (("enrol", "sign", pipe), "not a file"),
    ):
        err = run.refused(*command)
        assert words in " ".join(err.split())
        assert "Traceback" not in err
