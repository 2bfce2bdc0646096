"""`medfedaug compare` and `medfedaug export --compare`: short trainings on a user's own data."""

import json
import re

import pytest
from results import Page
from rich.console import Console
from running import TINY_AXES, TINY_OPTIONS

from medfedaug.analysis.gain_page import conclusions, gain_table
from medfedaug.config.comparison import ComparisonConfig, parse_budget
from medfedaug.config.run import RunConfig
from medfedaug.data.phantom import make_phantom
from medfedaug.errors import ConfigError
from medfedaug.research.datasets.partial_phantom import annotate_apart
from medfedaug.research.sweeps.short_trainings import Request, Timing, make_trainings, planned_rounds


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "data"
    make_phantom(folder, sites=2, patients=6, shape=(32, 32, 2))
    return folder


def result(**gains) -> dict:
    """The content of `compare.json` for gains with their ends."""
    ends = {name: dict(zip(("mean", "low", "high"), three, strict=True)) for name, three in gains.items()}
    better = [name for name, gain in ends.items() if gain["low"] > 0]
    return {
        "metric": "dice",
        "methods": ["fedavg", *ends],
        "recommended": sorted(better, key=lambda name: -ends[name]["mean"]),
        "gains": ends,
        "sites": {"A": {"patients": 4, "gains": ends, "nothing_learned": False}},
        "budget": {"seconds": 600.0, "spent": 300.0, "rounds": 8, "seeds": 2, "stages": [4, 8]},
        "trainings": [],
        "failed": {},
        "nothing_learned": "",
        "rising": False,
    }


def test_a_time_has_a_unit():
    assert [parse_budget(text) for text in ("90s", "10min", "1.5h")] == [90, 600, 5400]
    for text in ("10", "0min", "ten"):
        with pytest.raises(ConfigError, match="10min"):
            parse_budget(text)


# ---------------------------------------------------------------- what is tried


def test_a_method_for_each_cause_of_differences_is_tried(data, tmp_path):
    made = make_trainings(Request(data=data, out=tmp_path))
    assert made.config.order == ["fedavg", "single", "fedrdn", "fedbn", "ditto", "fedfa"]
    assert made.number == 12
    assert not made.left_out


def test_a_method_that_does_not_go_with_the_network_is_left_out_unless_it_is_asked_for(data, tmp_path):
    plain = ('network_args={"norm":["instance",{"affine":false}]}',)  # no parameters for FedBN to keep
    made = make_trainings(Request(data=data, out=tmp_path, settings=plain))
    assert "fedbn" not in made.config.methods
    assert "fedbn" in made.left_out["fedbn"]
    with pytest.raises(ConfigError, match="fedbn"):
        make_trainings(Request(data=data, out=tmp_path, settings=plain, methods=("fedbn",)))


def test_sites_that_lack_classes_are_taught_by_the_others(tmp_path):
    make_phantom(tmp_path / "data", sites=2, patients=5, shape=(32, 32, 2), classes=3)
    annotate_apart(tmp_path / "data", apart=True)
    made = make_trainings(Request(data=tmp_path / "data", out=tmp_path))
    assert "class_mean,condist" in made.config.methods


def test_settings_are_those_of_a_benchmark_with_one_value_each(data, tmp_path):
    given = ("rounds=7", "local_steps=3", "fedfa.prob=0.3")
    config = make_trainings(Request(data=data, out=tmp_path, settings=given)).config
    assert (config.run.rounds, config.run.local_steps) == (7, 3)
    assert config.methods["fedfa"] == [{"name": "fedfa", "args": {"prob": 0.3}}]
    with pytest.raises(ConfigError, match="one value"):
        make_trainings(Request(data=data, out=tmp_path, settings=("rounds=7,8",)))


def test_the_rounds_follow_from_the_budget(data, tmp_path):
    made = make_trainings(Request(data=data, out=tmp_path))
    timing = Timing(opening=1.0, round=2.0, spent=12.0)
    assert planned_rounds(timing, made, 600.0) == 15  # (588 s / 12 - 3 s) / (1.5 * 2 s)
    assert planned_rounds(timing, made, 1e6) == 100
    with pytest.raises(ConfigError, match=r"12 trainings of 4 rounds take about 3 min"):
        planned_rounds(timing, made, 60.0)


# ---------------------------------------------------------------- what is said


def test_the_conclusions_name_whom_a_method_helped_by_how_much():
    shown = result(single=(-0.2, -0.3, -0.1), ditto=(0.1, 0.02, 0.2), fedfa=(0.0, -0.1, 0.1))
    said = conclusions(shown, "data", ("rounds=8", 'network_args={"a": 1}'))
    assert said[0] == (
        "Training together helped: each site by itself has -0.200 [-0.300, -0.100] Dice against fedavg."
    )
    assert "Better than fedavg: ditto +0.100 [+0.020, +0.200]." in said
    assert "Not distinguishable from fedavg: fedfa." in said
    assert "At A, most: ditto +0.100 [+0.020, +0.200]." in said
    assert "medfedaug benchmark --data data --methods fedavg ditto --seeds 5" in said[-1]
    assert """--set rounds=40 'network_args={"a": 1}' --out""" in said[-1]
    assert "medfedaug export --methods ditto --rounds 40" in conclusions(shown)[-1]
    both = result(single=(0.3, 0.2, 0.4), ditto=(0.1, 0.02, 0.2))
    assert "medfedaug export --methods ditto" in conclusions(both)[-1]
    assert "Next" not in conclusions(result(single=(0.3, 0.2, 0.4)))[-1]


def test_nothing_is_recommended_where_nothing_shows():
    said = conclusions(result(single=(-0.1, -0.3, 0.1), ditto=(0.1, -0.02, 0.2)), "data")
    assert said[0].startswith("Separate and joint training cannot be distinguished: ")
    assert "from 0; ditto has the largest, +0.100 [-0.020" in said[-1]
    assert "from 0; no method has one" in conclusions(result(single=(-0.1, -0.3, 0.1)))[-1]
    assert conclusions(result(single=(-0.1, -0.3, 0.1), ditto=(0.1, 0.02, 0.2)))[0].startswith("Better than")
    assert not any("medfedaug benchmark" in sentence for sentence in said)


@pytest.mark.parametrize("width", [70, 80, 90])
def test_no_cell_of_the_table_is_cut_in_a_narrow_terminal(width):
    site = result(ditto=(0.5, -0.125, 0.875))["sites"]["A"]
    table = gain_table({**result(ditto=(0.1, -0.02, 0.2)), "sites": dict.fromkeys("ABC", site)})
    console = Console(width=width)
    with console.capture() as printed:
        console.print(table)
    words = printed.get().split()
    assert {"distinguishable", "+0.200]", "rounds"} <= {*words}
    assert words.count("+0.875]") == 3 * (width > 70)  # the sites' columns are left out whole


def test_methods_that_all_learned_nothing_are_not_compared():
    nothing = {**result(ditto=(0.1, 0.02, 0.2)), "nothing_learned": "every test Dice is 0"}
    (only,) = conclusions(nothing)
    assert only.startswith("No comparison: no method learned anything in 8 rounds")
    assert "Train longer" in only


# ---------------------------------------------------------------- the commands


def test_the_command_compares_continues_and_refuses_other_settings(run, data, tmp_path):
    out = tmp_path / "out"
    options = ("compare", "--data", data, "--methods", "ditto", "--budget", "10min", "--device", "cpu")
    options += (
        "--threads",
        1,
        "--out",
        out,
        "--set",
        "rounds=2",
        "local_steps=2",
        "batch_size=4",
        *TINY_AXES,
    )
    printed = run.ok(*options, "--json", tmp_path / "again.json")
    assert "budget 10 min: 6 trainings (fedavg, single, ditto; 2 seeds) of up to 2 rounds" in printed
    record = json.loads((out / "compare.json").read_text())
    assert record == json.loads((tmp_path / "again.json").read_text())
    assert set(record["gains"]) <= {"single", "ditto"}
    assert len(record["trainings"]) == 6
    page = Page((out / "compare.html").read_text())
    for sentence in record["conclusions"]:
        assert sentence in page.text
        assert " ".join(sentence.split()) in " ".join(printed.split())
    assert not [*out.rglob("*.pt")]
    # Asked again, nothing is trained anew.
    printed = run.ok(*options)
    assert "to round" not in printed
    assert json.loads((out / "compare.json").read_text()) == record
    assert "other settings" in run.refused(*options, "local_epochs=2")


def test_the_job_has_the_trainings_and_neither_code_nor_paths(run, tmp_path):
    job = tmp_path / "job"
    options = ("--task", "segmentation", "--rounds", 4, "--budget", "2h", *TINY_OPTIONS)
    printed = run.ok("export", "--compare", "--methods", "fedrdn fedrdn,fedfa", *options, "--out", job)
    assert (
        "8 trainings (fedavg, single, fedrdn, fedrdn,fedfa; 2 seeds) of up to 4 rounds within 2h" in printed
    )
    text = "".join(path.read_text() for path in job.rglob("*.json"))
    assert {path.suffix for path in job.rglob("*") if path.is_file()} == {".json"}
    paths = set(re.findall(r"\"path\": \"(medfedaug[^\"]+)\"", text))
    module = "medfedaug.nvflare_jobs.job.comparison."
    assert paths == {f"{module}ComparisonController", f"{module}ComparisonExecutor"}
    server = json.loads(next(job.rglob("config_fed_server.json")).read_text())
    (settings,) = [part["args"]["config"] for part in server["workflows"] if "Comparison" in part["path"]]
    config = ComparisonConfig.from_dict(settings)
    assert (config.budget, config.run.rounds) == (7200, 4)
    assert list(config.methods)[2:] == ["fedrdn", "fedrdn,fedfa"]
    assert isinstance(config.configs()["fedrdn/1"], RunConfig)


def test_options_of_a_run_are_refused_for_a_comparison(run, tmp_path):
    job = ("export", "--task", "segmentation", *TINY_OPTIONS, "--out", tmp_path / "job")
    assert "--budget is for a comparison" in run.refused(*job, "--methods", "fedavg", "--budget", "2h")
    assert "--resume is for a run" in run.refused(*job, "--compare", "--resume")
