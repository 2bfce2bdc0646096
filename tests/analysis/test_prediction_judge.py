"""Predictions of federations that were left out, against gains that follow a law."""

import json
from importlib.resources import files

import numpy as np
import pytest
from calibrations import write_table

from medfedaug.analysis.calibration_table import Calibration
from medfedaug.analysis.prediction_judge import (
    judge_anew,
    judge_predictions,
    judge_table,
    left_out,
    predictions,
    write_judgements,
)


@pytest.fixture
def given(monkeypatch):
    """Tables without that of the package."""

    def load(path):
        monkeypatch.setattr("medfedaug.analysis.calibration_table._TABLE", "analysis/none.csv")
        return Calibration.load([path])

    return load


def judged(table, methods, level="mean"):
    return judge_predictions(left_out(table, methods, level=level), methods, level=level)


def test_left_out_families_lie_in_the_intervals_as_often_as_these_say(given, tmp_path):
    found = []
    for seed in range(6):
        table = given(write_table(tmp_path / f"{seed}.csv", families=7, each=3, seed=seed, noise=0.03))
        found.append(judged(table, "norm"))
    assert {one.federations for one in found} == {21}
    assert 0.7 <= np.mean([one.coverage80 for one in found]) <= 0.95
    assert all(one.coverage95 is None for one in found)  # 18 federations of the others: 19 are needed
    assert all(not one.holds for one in found)


def test_skill_is_shown_where_there_is_a_law_and_not_where_there_is_chance(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=10, each=4, seed=3, noise=0.02))
    law, chance = judged(table, "norm"), judged(table, "fedfa")
    assert law.coverage95 >= 0.9
    assert law.has_skill
    assert law.error < 0.5 * law.error_of_zero
    assert chance.error == pytest.approx(chance.error_of_zero, rel=0.1)
    assert not chance.has_skill


def test_the_standard_error_of_skill_has_families_as_units(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=4, each=3, seed=2, noise=0.03))
    found = left_out(table, "norm")
    one = judge_predictions(found, "norm")
    assert (one.rows, one.federations, one.families) == (36, 12, 4)
    errors = np.array([abs(f.expected.mean - f.gain) for f in found])
    zeros = np.array([abs(f.gain) for f in found])
    assert one.error == pytest.approx(errors.mean())
    assert one.error_of_zero == pytest.approx(zeros.mean())
    better = (zeros - errors) - (zeros - errors).mean()
    names = np.array([f.federation.family for f in found])
    apart = [better[names == name].sum() for name in set(names)]
    assert one.standard_error == pytest.approx(np.sqrt(np.sum(np.square(apart))) / 36)
    # Each gain is of a site, and was predicted without any federation of its family.
    assert {f.site for f in found} == {"A", "B", "C"}
    again = predictions(table.without("family 1"), table.of_family("family 1"), "norm")
    assert [f.expected for f in again] == [f.expected for f in found if f.federation.family == "family 1"]


def test_nothing_is_judged_without_other_families(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=1, each=6, seed=0, noise=0.02))
    assert left_out(table, "norm") == []
    assert judge_predictions([], "norm") is None
    assert predictions(table, table, "unknown") == []


def test_a_record_of_judgements_is_read_for_its_own_table_alone(given, tmp_path, monkeypatch):
    table = given(write_table(tmp_path / "t.csv", families=3, each=3, seed=2, noise=0.03))
    found, record = judge_table(table), tmp_path / "judged.json"
    assert {(one.methods, one.over) for one in found} == {
        ("fedavg", "single"),
        ("norm", "fedavg"),
        ("fedfa", "fedavg"),
        ("single", "fedavg"),
    }
    write_judgements(table, found, record)
    monkeypatch.setattr("medfedaug.analysis.prediction_judge._RECORD", str(record))
    with monkeypatch.context() as patch:
        patch.setattr("medfedaug.analysis.prediction_judge.left_out", None)  # nothing is judged again
        assert judge_table(table) == found
    other = table.without("family 1")
    assert judge_table(other) != found


def test_the_record_of_the_package_is_of_its_table():
    """`benchmarks/judge_prospect.py --json` writes it; run it after each change of the table."""
    told = json.loads((files("medfedaug") / "analysis/judged.json").read_text())
    assert told["table"] == Calibration.load().scored_by("dice").digest


@pytest.mark.slow
def test_the_judgements_of_the_package_are_those_of_its_table_and_model():
    table = Calibration.load().scored_by("dice")
    for one, other in zip(judge_table(table), judge_anew(table), strict=True):
        assert vars(one) == {name: pytest.approx(value) for name, value in vars(other).items()}
