"""`mfa.simulate` as a script calls it: a keyword for every setting, and a run that is looked at."""

import json
from dataclasses import fields

import pytest
from running import TINY_NETWORK

import medfedaug as mfa
from medfedaug.config.plan import Plan
from medfedaug.config.run import Execution, RunConfig, RunKeywords
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.methods import parse_methods
from medfedaug.runs.recorded_run import RecordedRun
from medfedaug.simulate import Keywords, Simulation, configure

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


def test_every_setting_has_its_type_as_a_keyword():
    settings = [
        entry for group in (RunConfig, Execution) for entry in fields(group) if entry.name != "methods"
    ]
    files = dict.fromkeys(("bundle", "init", "loop"), "str | Path | None")
    plain = {entry.name: entry.type.replace("tuple[str, ...]", "Sequence[str]") for entry in settings}
    plain = {name: kind.replace("dict[", "Mapping[") for name, kind in plain.items()} | files
    typed = {name: kind.__forward_arg__ for name, kind in RunKeywords.__annotations__.items()}
    assert typed == plain
    others = {entry.name: entry.type for entry in fields(Simulation)}
    of_simulation = {*others} - {"data", "out", "config", "init", "loop"}
    found = {name: kind.__forward_arg__ for name, kind in Keywords.__annotations__.items() if name in others}
    assert {name: kind for name, kind in found.items() if name not in files} == {
        name: others[name] for name in of_simulation
    }


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
    page = run._repr_html_()
    assert "<td>site &lt;0&gt;</td><td>0.500</td>" in page
    assert "<td>mean</td><td>0.500</td>" in page
    assert page.count("<tr>") == 17 + 1  # heading, 15 sites, how many more, mean
    assert max(len(repr(run.results)), len(run.results._repr_html_())) < 500


def test_a_plan_shows_in_a_notebook_what_differs_from_its_defaults():
    assert Plan(spacing=(1, 1, 3))._repr_html_() == (
        "<table><tr><th>Plan</th><th>value</th></tr><tr><td>spacing</td><td>(1.0, 1.0, 3.0)</td></tr></table>"
    )
    assert "its default" in Plan()._repr_html_()


@pytest.mark.parametrize("name", [entry.name for entry in (*fields(RunConfig), *fields(Execution))])
def test_every_setting_is_a_keyword(name, tmp_path):
    """The names of the settings are checked before the folder, which is missing."""
    given = {name: "fedavg" if name == "methods" else None}
    with pytest.raises(MedFedAugError, match="no such folder"):
        mfa.simulate(tmp_path / "none", tmp_path / "run", **given)


def test_what_is_no_setting_is_named_with_what_is_meant(phantom_dir, tmp_path):
    for wrong, meant in (("epochs", "local_epochs"), ("round", "rounds"), ("method", "methods")):
        with pytest.raises(ConfigError, match=f"'{wrong}' is not known; did you mean.*{meant}"):
            mfa.simulate(phantom_dir, tmp_path / "run", **{wrong: 3})
    config = configure(find_sites(phantom_dir), methods=({"name": "fedavg", "args": {}},))
    with pytest.raises(ConfigError, match="leave out rounds, or config"):
        mfa.simulate(phantom_dir, tmp_path / "run", config, rounds=3)
    assert not (tmp_path / "run").exists()
