"""`mfa.simulate` as a script calls it: a keyword for every setting, and a run that is looked at."""

import json
from dataclasses import fields

import pytest
from running import TINY_NETWORK

import medfedaug as mfa
from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.methods import parse_methods
from medfedaug.runs.recorded_run import RecordedRun
from medfedaug.simulate import Simulation, configure

QUICK = {"engine": "inprocess", "device": "cpu", "report": False, "batch_size": 4, **TINY_NETWORK}


def test_the_first_example_runs_and_gives_a_run(phantom_dir, tmp_path):
    run = mfa.simulate(phantom_dir, tmp_path / "run", methods="fedrdn", rounds=2, threads=1, **QUICK)
    record = json.loads((tmp_path / "run/results.json").read_text())
    assert run.best == record["selected_round"] in (1, 2)
    assert run.scores["mean"] == record["test"]["mean"]
    assert run.scores["site_A"]["dice"] == record["test"]["sites"]["site_A"]["dice"]
    assert run.report == tmp_path / "run/report.html"
    assert [method["name"] for method in run["config"]["methods"]] == ["fedrdn"]
    assert run["config"]["rounds"] == 2
    assert dict(run) == record
    image = next((phantom_dir / "site_A").rglob("*.nii.gz"))
    assert len(run.predict(image, tmp_path / "predicted", site="site_A").cases) == 1


def test_names_may_be_a_list_and_the_folder_may_be_left_out(phantom_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = mfa.simulate(data=phantom_dir, methods=["fedrdn", "fedfa"], rounds=1, **QUICK)
    assert [method["name"] for method in run["config"]["methods"]] == ["fedrdn", "fedfa"]
    assert (tmp_path / "runs/fedrdn,fedfa/results.json").is_file()


@pytest.mark.parametrize("methods", ["fedrdn,fedfa+", ["fedrdn", "fedfa+"], ["fedrdn", {"name": "fedfa+"}]])
def test_methods_are_names_in_one_text_or_in_a_list(phantom_dir, methods):
    if methods[-1] == {"name": "fedfa+"}:
        methods = ["fedrdn", *parse_methods("fedfa+")]
    simulation = Simulation.of(phantom_dir, methods=methods)
    assert simulation.config.methods == tuple(parse_methods("fedrdn,fedfa+"))


def test_a_run_is_one_screen_in_a_notebook(phantom_dir):
    record = {
        "config": {"methods": [{"name": "fedrdn"}]},
        "rounds": [{"round": 1, "sites": {"text": "x" * 100_000}}],
        "selected_round": 1,
        "test": {"sites": {f"site <{k}>": {"dice": 0.5} for k in range(40)}, "mean": {"dice": 0.5}},
    }
    run = RecordedRun(phantom_dir / "global_model.pt", record)
    lines = repr(run).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines[1:])) <= 110
    assert "and 25 more" in repr(run)


@pytest.mark.parametrize("name", [entry.name for entry in (*fields(RunConfig), *fields(Execution))])
def test_every_setting_is_a_keyword(name, tmp_path):
    """The names of the settings are checked before the folder, which is missing."""
    given = {name: "fedavg" if name == "methods" else None}
    with pytest.raises(MedFedAugError, match="no such folder"):
        mfa.simulate(tmp_path / "none", tmp_path / "run", **given)


def test_what_is_no_setting_is_named_with_what_is_meant(phantom_dir, tmp_path):
    for wrong, meant in (("epochs", "local_epochs"), ("round", "rounds"), ("method", "methods")):
        with pytest.raises(ConfigError, match=f"{wrong} is not known; did you mean.*{meant}"):
            mfa.simulate(phantom_dir, tmp_path / "run", **{wrong: 3})
    config = configure(find_sites(phantom_dir), methods=({"name": "fedavg", "args": {}},))
    with pytest.raises(ConfigError, match="leave out rounds, or config"):
        mfa.simulate(phantom_dir, tmp_path / "run", config, rounds=3)
    with pytest.raises(ConfigError, match="leave out threads"):
        mfa.simulate(phantom_dir, tmp_path / "run", execution=Execution(), threads=3)
    assert not (tmp_path / "run").exists()
