"""`medfedaug demo`: what a newcomer sees."""

from __future__ import annotations

import json
import re

from results import Page

from medfedaug.analysis import load_run, summary_table
from medfedaug.cli.catalogue import describe_method


def test_the_demo_tells_what_differs_what_was_done_and_what_came_of_it(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, err = run("demo", "--sites", 2, "--patients", 3, "--rounds", 1)
    assert code == 0, err
    scanners = json.loads((tmp_path / "demo/data/phantom.json").read_text())["sites"]
    flat = " ".join(printed.split())
    for name, scanner in scanners.items():
        assert name in flat
        assert f"{scanner['gain']:.0f}" in flat
    runs = ["fedavg", "fedrdn"]
    table = summary_table([load_run(tmp_path / "demo" / name) for name in runs])
    for row in table.rows:
        assert str(row.mean) in flat
    for name in runs:
        assert describe_method(name).what.rstrip(".") in flat
    assert "is open: a verdict takes more (1 of 5 seeds, 2 of 20 patients)." in flat
    # The last lines: the page, and what to do next, as commands that exist.
    last = printed.split("Next:")[1].strip().splitlines()
    commands = [re.match(r"\s*(medfedaug .*?)\s+#", line)[1] for line in last]
    assert len(commands) == 3
    assert run(*commands[0].split()[1:])[0] == 0
    assert run("methods")[0] == 0
    page = Page((tmp_path / "demo/report.html").read_text())
    assert "demo/report.html" in flat
    assert "What differs between the sites is their scanners;" in page.text
    for name, scanner in scanners.items():
        assert f"{name}{scanner['gain']:.0f}" in page.text  # cells of a line
    assert any(name == "src" and value.startswith("data:image/jpeg") for name, value in page.attributes)

    code, _, err = run("demo")
    assert code == 2
    assert "not an empty folder" in err
