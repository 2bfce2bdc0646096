import csv

import numpy as np
import pytest
from calibrations import fingerprint, write_table

from medfedaug.analysis.calibration_table import Calibration, features
from medfedaug.analysis.gain_prediction import GainModel, judge_predictions
from medfedaug.errors import ConfigError


@pytest.fixture
def given(monkeypatch):
    """Tables without that of the package."""

    def load(path):
        monkeypatch.setattr("medfedaug.analysis.calibration_table._TABLE", "analysis/none.csv")
        return Calibration.load([path])

    return load


def sites(apart):
    return [fingerprint("A"), fingerprint("B"), fingerprint("C", mean=0.3 + apart)]


def test_the_slope_of_the_law_is_found_and_its_absence_too(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=8, each=4, seed=0, noise=0.005))
    found = features(sites(0.15))
    norm, fedfa = GainModel(table, "norm"), GainModel(table, "fedfa")
    assert norm.predict(found["C"]).mean == pytest.approx(0.1 * np.log1p(7.5 / np.sqrt(2)), abs=0.03)
    assert norm.predict(found["C"]).mean > norm.predict(found["A"]).mean + 0.02
    assert abs(fedfa.predict(found["C"]).mean) < 0.01
    assert GainModel(table, "single").predict(found["A"]).mean == pytest.approx(-0.1, abs=0.01)


def test_left_out_families_lie_in_the_intervals_as_often_as_these_say(given, tmp_path):
    judged = []
    for seed in range(6):
        table = given(write_table(tmp_path / f"{seed}.csv", families=7, each=3, seed=seed, noise=0.03))
        judged.append(judge_predictions(table, "norm", level="mean"))
    assert {one.federations for one in judged} == {21}
    assert 0.7 <= np.mean([one.coverage80 for one in judged]) <= 0.95
    assert all(one.coverage95 is None for one in judged)  # 18 federations of the others: 19 are needed
    assert all(not one.holds for one in judged)


def test_enough_federations_show_that_the_intervals_hold(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=10, each=4, seed=3, noise=0.02))
    judged = judge_predictions(table, "norm", level="mean")
    assert judged.coverage95 >= 0.9
    assert judged.has_skill
    assert judged.error < 0.5 * judged.error_of_zero
    nothing = judge_predictions(table, "fedfa", level="mean")
    assert nothing.error > 0.8 * nothing.error_of_zero


def test_an_interval_that_few_federations_cannot_give_is_none(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=3, each=1, seed=0, noise=0.02))
    found = GainModel(table, "norm", level="mean").predict(features(sites(0.1))["A"])
    assert found.interval80 is None
    assert found.interval95 is None
    assert found.to_dict()["low80"] is None


def test_what_is_unlike_the_table_is_said_and_has_a_wider_interval(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=6, each=4, seed=1, noise=0.02))
    model = GainModel(table, "norm")
    usual = model.predict(features(sites(0.1))["C"])
    strange = model.predict(
        features([*sites(0.1)[:2], fingerprint("C", mean=0.4, edge=20, noise=0.2, size=0.5)])["C"]
    )
    assert not usual.is_unlike
    assert strange.is_unlike
    widths = [ends[1] - ends[0] for ends in (usual.interval80, strange.interval80)]
    assert widths[1] > 2 * widths[0]


def test_seeds_of_a_federation_count_as_one(given, tmp_path):
    path = write_table(tmp_path / "t.csv", families=3, each=2, seed=0, noise=0.02)
    rows = list(csv.DictReader(path.open()))
    with path.open("a", newline="") as file:
        csv.DictWriter(file, list(rows[0])).writerows({**row, "seed": "1"} for row in rows)
    table = given(path)
    assert (table.number, table.seeds, len(table.federations)) == (6, 2, 12)
    model = GainModel(table, "norm")
    assert model.federations == 6


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("score", "high", "line 2: could not convert"),
        ("fingerprint", "{", "line 2: "),
        ("fingerprint", "", "federation 0_0: a federation needs FedAvg's score and a fingerprint"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(given, tmp_path, column, value, words):
    path = write_table(tmp_path / "t.csv", families=2, each=1, seed=0, noise=0.02)
    rows = list(csv.DictReader(path.open()))
    rows[0][column] = value
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ConfigError, match=words) as error:
        given(path)
    assert "\n" not in str(error.value)


def test_a_file_of_something_else_is_refused(given, tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="lacks the column federation"):
        given(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        given(tmp_path / "none.csv")
