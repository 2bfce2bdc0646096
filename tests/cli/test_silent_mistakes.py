"""Commands that were asked for something else than what they would do say so."""

import json

import pytest
from running import TINY_OPTIONS

from medfedaug.statistics import load_statistics
from medfedaug.transforms import FedRDN


def test_statistics_of_a_second_site_join_those_of_the_first(run, phantom_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = {}
    for name in ("site_A", "site_B"):
        code, shown, err = run("statistics", "--data", phantom_dir / name)
        assert code == 0, err
        saved[name] = load_statistics("statistics.json")[name]
    assert load_statistics("statistics.json") == saved
    assert "also has site_A" in shown
    assert FedRDN("statistics.json").sites == ("site_A", "site_B")
    # A site that is asked again takes its own place, where that is meant.
    code, _, err = run("statistics", "--data", phantom_dir / "site_A", "--limit", 1)
    assert code == 2
    assert "statistics.json has site_A already; choose another file with --out, or --overwrite" in err
    assert load_statistics("statistics.json") == saved
    code, shown, _ = run("statistics", "--data", phantom_dir / "site_A", "--limit", 1, "--overwrite")
    assert "the file also has site_B" in shown
    again = load_statistics("statistics.json")
    assert again["site_B"] == saved["site_B"]
    assert again["site_A"].count == 1 < saved["site_A"].count
    code, _, err = run("statistics", "--data", phantom_dir / "site_A", "--intensity", "scale")
    assert code == 2
    assert "statistics.json: its statistics are of raw images, not of scale ones" in " ".join(err.split())
    assert load_statistics("statistics.json") == again


def test_statistics_replace_no_other_file_and_mix_no_channels(run, phantom_dir, make_site, tmp_path):
    target = tmp_path / "notes.json"
    target.write_text('{"mine": 1}')
    code, _, err = run("statistics", "--data", phantom_dir / "site_A", "--out", target)
    assert code == 2
    assert "choose another file with --out" in " ".join(err.split())
    assert target.read_text() == '{"mine": 1}'
    target.unlink()
    assert run("statistics", "--data", phantom_dir / "site_A", "--out", target)[0] == 0
    before = target.read_bytes()
    code, _, err = run("statistics", "--data", make_site("B", channels=2), "--out", target)
    assert code == 2
    assert "site 'B' has 2 channels, site 'site_A' has 1" in " ".join(err.split())
    assert target.read_bytes() == before


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
