"""A search sees validation scores alone, goes on after it was killed, and tests its winner only."""

import json

import pytest

from medfedaug.errors import ConfigError, RunFailed
from medfedaug.research.sweeps.experiment import make_experiment
from medfedaug.research.sweeps.search import read_choices, search

TINY = ["network=lenet5", "image_size=32", "batch_size=4"]
CHOICES = {"learning_rate": {"low": 1e-6, "high": 1e-1, "log": True}, "methods": ["fedavg", "fedrdn"]}


def experiment(office, out, **given):
    values = {
        "data": office,
        "protocol": "office_caltech_10",
        "out": out,
        "scale": 0.001,
        "limit": 8,
        **given,
    }
    return make_experiment(None, {"methods": ["fedavg", "fedrdn"], **values}, TINY)


def records(out):
    return {path.parent: json.loads(path.read_text()) for path in (out / "search").glob("*/*/*/results.json")}


def test_the_best_validation_wins_and_no_trial_is_tested(office, tmp_path):
    pytest.importorskip("optuna")
    events = []
    result = search(experiment(office, tmp_path), CHOICES, 4, threads=1, on_event=events.append)
    trials = records(tmp_path)
    assert all(not record["test"]["sites"] for record in trials.values())
    assert not any(event["event"] == "tested" for event in events)
    scores = {
        (record["config"]["learning_rate"], path.parent.parent.name): max(
            entry["val_accuracy"] for entry in record["rounds"]
        )
        for path, record in trials.items()
    }
    assert result.score == max(scores.values())
    assert result.score == scores[result.experiment.settings["learning_rate"], result.chosen["methods"]]
    assert result.trials == len(trials) == 4
    assert result.experiment.methods == (result.chosen["methods"],)
    assert result.experiment.out == tmp_path
    assert [event["number"] for event in events if event["event"] == "run"] == [*range(1, 5)]
    text = " ".join(result.sentences())
    assert "among 4 configurations" in text
    assert "No verdict" in text
    again = search(experiment(office, tmp_path), CHOICES, 4, threads=1)  # nothing is left to do
    assert (again.chosen, again.score) == (result.chosen, result.score)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names and values are needed"),
        ("[1, 2]", "names and values are needed"),
        ("lr: [1", "not readable as YAML"),
        ("lr: 3", "lr: needs two values or more, or low below high"),
        ("lr: [3]", "lr: needs two values or more"),
        ("lr: {low: 1, high: 1}", "low below high"),
        ("lr: {low: 0, high: 1, log: true}", "low above 0 with log"),
        ("lr: {low: 0, high: 1, steps: 3}", "unknown keys"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, message):
    file = tmp_path / "search.yml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_choices(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_cannot_be_searched_is_refused_before_a_run(office, tmp_path):
    pytest.importorskip("optuna")
    for choices, given, message in (
        ({"learning_rate": [0.1, 0.2]}, {}, "methods: a search takes one value"),
        ({"no_setting": [1, 2]}, {"methods": ["fedavg"]}, "neither METHOD.ARG nor a setting: no_setting"),
    ):
        with pytest.raises(ConfigError, match=message):
            search(experiment(office, tmp_path / "no", **given), choices, 2)
    assert not list((tmp_path / "no").glob("search/*/*"))
    choices = {"fedprox.mu": [1e38, 2e38]}
    with pytest.raises(RunFailed, match="no trial has a validation score"):
        search(experiment(office, tmp_path / "bad", methods=["fedprox"]), choices, 2)


@pytest.mark.parametrize("given", [{"folds": 3}, {"holdout": ["amazon"]}])
def test_a_search_reads_no_patient_of_a_later_test(office, tmp_path, given):
    with pytest.raises(ConfigError, match=f"a search cannot have --{next(iter(given))}"):
        search(experiment(office, tmp_path, **given), CHOICES, 2)
    assert not (tmp_path / "search").exists()
