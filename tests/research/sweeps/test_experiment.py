"""`medfedaug benchmark` on own data: methods x seeds x folds x settings, by options and by file."""

import dataclasses
import json

import pytest
import yaml

from medfedaug.config.plan import Plan
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError
from medfedaug.federation.planning.fingerprint import fingerprint
from medfedaug.federation.planning.planner import make_plan
from medfedaug.research.sweeps.experiment import Experiment, make_experiment, write_experiment
from medfedaug.research.sweeps.run_list import plan

NETWORK = 'network_args={"features": [4, 8, 8, 8, 8, 4]}'
TINY = ("rounds=1", "batch_size=8", NETWORK)


@pytest.fixture
def data(make_site, tmp_path):
    for name in "AB":
        make_site(name, cases=(2, 1, 1))
    return tmp_path / "data"


def arguments(data, out, *more):
    device = ("--device", "cpu", "--threads", 1, "--no-pictures")
    return (
        "benchmark",
        *(("--data", data) if data else ()),
        *(("--out", out) if out else ()),
        *device,
        *more,
    )


def results(out):
    return sorted(path.parent.relative_to(out).as_posix() for path in out.glob("*/*/seed-*/results.json"))


def test_methods_seeds_folds_and_settings_on_ones_own_data_which_a_second_call_leaves_alone(
    run, data, tmp_path
):
    out = tmp_path / "runs"
    compared = ("--methods", "fedavg", "fedrdn", "--seeds", 1, "--folds", 3)
    code, printed, err = run(*arguments(data, out, *compared, "--set", *TINY))
    assert code == 0, err
    assert "every case counts as a patient" in err
    folds = [f"fold={fold}of3/seed-0" for fold in (1, 2, 3)]
    assert results(out) == [f"{method}/{fold}" for method in ("fedavg", "fedrdn") for fold in folds]
    assert "Own experiment: 1 x 1 epoch, basicunet" in printed
    for name in ("table.md", "table.csv", "metrics.md", "report.html"):
        assert (out / name).stat().st_size
    # After one epoch nothing is learned, and then nothing is compared by patient.
    assert "Nothing was learned: every test Dice is 0." in (out / "table.md").read_text()
    assert not (out / "patients.md").exists()
    tests = [json.loads((out / f"fedavg/{fold}/results.json").read_text())["test"] for fold in folds]
    tested = [case for test in tests for case in test["sites"]["A"]["cases"]]
    assert sorted(tested) == ["0", "1", "2", "3"]  # over the folds, every case once

    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*/seed-*/*")}
    # The file with the results says it all, also from elsewhere.
    again = run.ok(*arguments(None, None, "--experiment", out / "experiment.yml"))
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*/seed-*/*")} == before
    assert again.splitlines()[:8] == printed.splitlines()[:8]


def test_a_file_says_what_is_run_options_take_precedence_and_the_whole_is_written_back(run, data, tmp_path):
    file, out = tmp_path / "try.yml", tmp_path / "runs"
    content = {
        "data": "data",
        "methods": ["fedavg", "fedfa"],
        "seeds": 3,
        "settings": {"rounds": 1, "batch_size": 8, "fedfa.prob": 0.3, "learning_rate": "1e-3"},
        "vary": {"patch_size": [[16, 16]]},
        "out": "runs",
    }
    file.write_text(yaml.safe_dump(content))
    run.ok(*arguments(None, None, "--experiment", file, "--seeds", 1, "--set", NETWORK))
    assert results(out) == [f"{name}/patch_size=[16,16]/seed-0" for name in ("fedavg", "fedfa")]
    record = json.loads((out / "fedfa/patch_size=[16,16]/seed-0/results.json").read_text())
    assert record["config"]["methods"] == [{"name": "fedfa", "args": {"prob": 0.3}}]
    assert record["config"]["plan"]["patch_size"] == [16, 16]
    assert record["config"]["learning_rate"] == 1e-3
    assert (record["data"], set(record["test"]["sites"])) == ("own_data", {"A", "B"})
    written = yaml.safe_load((out / "experiment.yml").read_text())
    assert (written["data"], written["out"], written["seeds"]) == ("../data", ".", 1)
    settings = {"rounds": 1, "optimizer": "adam", "batch_size": 8, "fedfa.prob": 0.3}
    assert written["settings"].items() >= {**settings, "network": "basicunet", "intensity": "scale"}.items()
    assert written["vary"] == {"patch_size": [[16, 16]]}


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        (["spatial_dims=3"], [2]),
        (["spatial_dims=2,3", "batch_size=8"], [8, 8]),
        (["spatial_dims=2,3", "batch_size=16,4"], [16, 4, 16, 4]),
    ],
)
def test_what_follows_from_the_task_is_in_the_file(data, tmp_path, settings, batches):
    given = {"data": data, "methods": ["fedavg"], "out": tmp_path / "runs", "seeds": 1}
    first = make_experiment(None, given, settings)
    again = make_experiment(write_experiment(first, first.preset()), {})
    for experiment in (first, again):
        preset = experiment.preset()
        runs = plan(preset, experiment.root, experiment.methods, seeds=1, axes=experiment.axes())
        assert [run.config.batch_size for run in runs] == batches


def test_what_varies_of_a_plan_is_not_decided_by_the_planner(data, tmp_path):
    given = {"data": data, "methods": ["fedavg"], "out": tmp_path / "runs", "seeds": 1}
    varied = ["plan=auto", "spatial_dims=2", "patch_size=[32,32],[48,48]", "batch_size=2,16"]
    sites = {name: fingerprint(VolumeFolder.open(data / name), ("background", "lesion")) for name in "AB"}
    first = make_experiment(None, given, varied)
    again = make_experiment(write_experiment(first, first.preset()), {})
    for experiment in (first, again):
        runs = plan(experiment.preset(), experiment.root, experiment.methods, seeds=1, axes=experiment.axes())
        made = [make_plan(sites, run.config).configure(run.config) for run in runs]
        sizes = [(config.plan.patch_size, config.batch_size) for config in made]
        assert sizes == [((32, 32), 2), ((32, 32), 16), ((48, 48), 2), ((48, 48), 16)]
    with pytest.raises(ConfigError, match="basicunet does not take a batch of 1 of 8 x 8 voxels"):
        make_plan(
            sites,
            dataclasses.replace(
                runs[0].config, plan=Plan(2, patch_size=(8, 8)), planning={"given": ["patch_size"]}
            ),
        )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("methods: [fedavg", "not readable as YAML"),
        ("- fedavg", "names and values are needed"),
        ("method: fedavg", "unknown keys method (did you mean methods?); known: data, methods"),
        ("methods: fedavg", "--data and --out missing"),
        ("{data: data, out: x, methods: fedwrong}", "method 'fedwrong' is not known"),
        (
            "{data: data, out: x, methods: fedavg, settings: {lr: 1}}",
            "--set: neither METHOD.ARG nor a setting: lr; known: network, network_args",
        ),
        (
            "{data: data, out: x, methods: fedavg, settings: {fedfa.prob: 1}}",
            "fedfa is not among the methods",
        ),
        ("{data: data, out: x, methods: fedavg, settings: {rounds: many}}", "rounds must be a whole number"),
        ("{data: data, out: x, methods: fedavg, folds: 9}", "too few for 9 folds"),
        ("{data: data, out: x, methods: fedavg, folds: 2}", "2 folds: at least 3 are needed"),
        ("{data: data, out: x, methods: fedavg, seeds: few}", "seeds must be a whole number, got 'few'"),
        ("{data: data, out: x, methods: fedavg, settings: [rounds]}", "settings and vary are names"),
        ("{data: data, out: x, methods: fedavg, scale: 2}", "scale must be at most 1, got 2"),
    ],
)
def test_a_wrong_file_is_one_line_and_nothing_is_written(run, data, tmp_path, content, words):
    file = tmp_path / "try.yml"
    file.write_text(content)
    err = run.refused(*arguments(None, None, "--experiment", file))
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "x").exists()


def test_sites_that_are_numbers_in_yaml_can_be_left_out():
    assert Experiment(data="d", methods="fedavg", out="o", holdout=2).holdout == ("2",)
    assert Experiment(data="d", methods="fedavg", out="o", holdout=[1, "B"]).holdout == ("1", "B")
