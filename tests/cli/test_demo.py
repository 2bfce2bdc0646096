"""`medfedaug demo`: a newcomer sees an odd scanner, two trainings, and what to do next."""

import json
import re

import pytest
from results import Page

from medfedaug.cli.catalogue import describe_method
from medfedaug.runs.load_results import load_run

pytestmark = pytest.mark.slow  # two trainings and their page


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What `demo --quick` prints, in a folder of its own."""
    from running import command

    folder = tmp_path_factory.mktemp("demo")
    options = ("--quick", "--out", folder / "demo", "--json", folder / "demo.json")
    code, printed, err = command("demo", *options)
    assert code == 0, err
    return folder, printed


def test_the_demo_names_the_odd_scanner_what_to_expect_and_what_came_of_it(shown):
    folder, printed = shown
    flat = " ".join(printed.split())
    scanners = json.loads((folder / "demo/data/phantom.json").read_text())["sites"]
    alike = {name: scanner for name, scanner in scanners.items() if name != "site_C"}
    for name, scanner in scanners.items():
        assert name in flat
        assert f"{scanner['gain']:.0f}" in flat
    assert len({scanner["gamma"] for scanner in alike.values()}) == 1
    assert scanners["site_C"]["gamma"] not in {scanner["gamma"] for scanner in alike.values()}
    assert "What to expect: plain averaging (fedavg) fails at site_C" in flat
    written = json.loads((folder / "demo.json").read_text())
    assert (written["odd"], written["remedy"]) == ("site_C", "fedrdn")
    for method in ("fedavg", "fedrdn"):
        assert describe_method(method).what.rstrip(".") in flat
        found = load_run(folder / "demo" / method).sites
        assert {name: by[method]["dice"] for name, by in written["sites"].items()} == found
    before, after = (written["sites"]["site_C"][method]["dice"] for method in ("fedavg", "fedrdn"))
    assert f"site_C, whose scanner differs: {before:.2f} with fedavg, {after:.2f} with fedrdn." in flat


def test_its_last_lines_are_commands_that_exist(shown, run, tmp_path, monkeypatch):
    _, printed = shown
    monkeypatch.chdir(tmp_path)  # the commands write to the working folder
    last = printed.split("Next, with")[1].strip().splitlines()[1:]
    commands = [re.match(r"\s*(medfedaug .*?)\s+#", line)[1] for line in last]
    assert [command.split()[1] for command in commands] == ["inspect", "benchmark", "methods"]
    inspect, benchmark, methods = (command.split()[1:] for command in commands)
    assert run(*inspect)[0] == 0
    assert run(*methods)[0] == 0
    options = {"--seeds", "--data", "--methods", "--out"}
    assert options <= set(benchmark)


def test_its_page_says_what_differs_and_shows_pictures(shown):
    folder, _ = shown
    page = Page((folder / "demo/report.html").read_text())
    assert "The hospitals differ only in their scanners, and site_C has the odd one" in page.text
    assert any(name == "src" and value.startswith("data:image/jpeg") for name, value in page.attributes)


def test_a_folder_with_something_in_it_is_left_alone(shown, run):
    folder, _ = shown
    assert "not an empty folder" in run.refused("demo", "--out", folder / "demo")


def test_a_seed_that_numpy_cannot_take_is_refused_in_one_line(run, tmp_path):
    for command in ("phantom", "demo"):
        assert "Traceback" not in run.refused(command, "--out", tmp_path / "out", "--seed", 2**32)
