"""A finished run: read, checked, and refused where it is malformed."""

import pytest
from results import content

from medfedaug.analysis.grouping import group_runs
from medfedaug.errors import DataError
from medfedaug.runs.load_results import load_run


def test_load_run_takes_folder_or_file(write):
    folder = write(methods=("fedavg", "fedrdn", "fedfa"), seed=4, unseen={"EZ": 0.6})
    run = load_run(folder)
    assert run == load_run(folder / "results.json")
    assert (run.label, run.seed, run.metric, run.selected_round) == ("fedrdn + fedfa", 4, "dice", 2)
    assert (run.sites, run.unseen, run.mean) == ({"DU": 0.5, "HT": 0.7}, {"EZ": 0.6}, 0.6)
    assert run.cases == {"DU": 1, "HT": 1, "EZ": 1}
    assert run.validation("DU") == pytest.approx([0.1, 0.2, 0.3])
    assert run.validation() == pytest.approx([0.15, 0.25, 0.35])
    assert run.gamma()["enc1"]["gamma_mean"] == [(1, 0.3, 0.51), (2, 0.3, 0.52), (3, 0.3, 0.53)]


def _without(*path):
    data = content()
    node = data
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return data


def _with(value, *path):
    data = content()
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], r"the content is \[\], expected an object"),
        (_without("config"), "expected an object with config"),
        (_with(["fedavg"], "config", "methods"), r"config.methods\[0\] is 'fedavg', expected an object"),
        (_with(True, "config", "seed"), "config.seed is True, expected a whole number"),
        (_without("rounds", 1, "sites"), r"rounds\[1\] is .*, expected an object with sites"),
        (_with(["DU"], "rounds", 0, "missing"), r"rounds\[0\].missing\[0\] is 'DU', expected an object"),
        (_with("x", "test", "sites", "DU", "cases", "p1"), "test.sites.DU.cases.p1 is 'x', expected"),
        (_with({}, "test", "mean"), "test.mean names no metric"),
        (_with({}, "test", "sites"), "test.sites names no site"),
        (_with(None, "selected_round"), "selected_round is None, expected a whole number"),
    ],
)
def test_a_malformed_file_is_told_in_one_line(write, data, problem):
    folder = write(data)
    with pytest.raises(DataError, match=problem) as error:
        load_run(folder)
    assert str(folder / "results.json") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing.results\.json.*No such file"):
        load_run(tmp_path / "nothing")
    for text in ('{"config": ', "[" * 100_000):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(DataError, match=r"results\.json: is no record") as error:
            load_run(tmp_path)
        assert "\n" not in str(error.value)


def test_a_setting_that_ended_makes_no_other_experiment(write):
    runs = [load_run(write(seed=seed, **ended)) for seed, ended in enumerate(({"ended": "updates"}, {}))]
    assert [*group_runs(runs)] == ["fedavg"]
