"""Gains predicted from pilots, against a law that the table follows and a float64 reference."""

import csv

import numpy as np
import pytest
from calibrations import write_table

from medfedaug.analysis.calibration_table import PHANTOM, REAL, Calibration
from medfedaug.analysis.gain_prediction import Expected, GainModel, gain_rows, recorded_rows
from medfedaug.errors import ConfigError


@pytest.fixture
def given(monkeypatch):
    """Tables without that of the package."""

    def load(path):
        monkeypatch.setattr("medfedaug.analysis.calibration_table._TABLE", "analysis/none.csv")
        return Calibration.load([path])

    return load


def test_each_gain_is_paired_with_the_pilot_of_another_seed(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=2, each=2, seed=0, noise=0.02, seeds=3))
    rows = gain_rows(table, "norm")
    assert (len(rows.gains), rows.number) == (4 * 3 * 2, 4)
    ours, *others = (one for one in table.federations if one.name == "0_0")

    def ahead(one, methods):
        return np.mean([one.scores[methods][site] - one.scores["fedavg"][site] for site in "ABC"])

    assert rows.pilot[:2] == pytest.approx([ahead(other, "single") for other in others])
    assert rows.gains[:2] == pytest.approx([ahead(ours, "norm")] * 2)
    # One seed has no pilot of another.
    alone = given(write_table(tmp_path / "t.csv", families=2, each=2, seed=0, noise=0.02))
    assert gain_rows(alone, "norm") is None
    assert recorded_rows(alone, "norm").number == 4


def test_slope_and_intervals_are_those_of_the_formula(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=4, each=3, seed=1, noise=0.02, seeds=2))
    rows = gain_rows(table, "norm")
    lost, y = np.maximum(rows.pilot, 0), rows.gains

    def slope(kept):  # federations have two rows each, so that all rows have one weight
        return (lost[kept] * y[kept]).sum() / (lost[kept] ** 2).sum()

    model = GainModel(rows)
    assert model.slope == pytest.approx(slope(np.full(len(y), True)), rel=1e-12)
    errors = [abs(y[i] - slope(rows.families != rows.families[i]) * lost[i]) for i in range(len(y))]
    order = np.sort(errors)
    place = next(k for k in range(len(order)) if (k + 1) / len(order) >= 0.8 * 13 / 12 - 1e-9)
    assert model.half_width(0.8) == pytest.approx(order[place], rel=1e-12)
    assert model.half_width(0.95) is None  # of 12 federations
    expected = model.predict(0.05)
    assert expected.mean == pytest.approx(0.05 * model.slope)
    assert expected.interval80 == pytest.approx([expected.mean - order[place], expected.mean + order[place]])
    assert expected.interval95 is None
    assert model.mean_at(-0.3) == 0
    flat = GainModel(rows, yardstick=True)
    assert flat.predict(0.05).mean == 0
    assert flat.half_width(0.8) == pytest.approx(np.sort(abs(y))[place])


def test_the_gain_over_training_alone_falls_with_the_pilot(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=4, each=3, seed=1, noise=0.005, seeds=2))
    model = GainModel(gain_rows(table, "fedavg", "single"))
    assert model.slope == pytest.approx(1.0, abs=0.1)
    assert model.mean_at(0.08) == pytest.approx(-0.08, abs=0.01)
    assert model.mean_at(-0.08) == pytest.approx(0.08, abs=0.01)


def test_an_interval_of_half_of_the_possible_gains_is_not_known(given, tmp_path):
    wide = given(write_table(tmp_path / "t.csv", families=4, each=3, seed=1, noise=0.9, seeds=2))
    found = GainModel(gain_rows(wide, "norm")).predict(0.05)
    assert found.interval80 is None


def test_fewer_test_patients_never_give_a_narrower_interval():
    found, last = Expected(0.1, (-0.1, 0.3), (-0.3, 0.5)), 0.0
    for deviation in (0.0, 0.05, 0.1, 0.2):
        wider = found.widened(deviation)
        width = wider.interval80[1] - wider.interval80[0]
        assert width == pytest.approx(2 * np.hypot(0.2, 1.2816 * deviation))
        assert width >= last
        last = width
    assert found.widened(0.4).interval80 is None  # half of the possible gains


def test_seeds_of_a_federation_count_as_one(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=3, each=2, seed=0, noise=0.02, seeds=2))
    assert (table.number, table.seeds, len(table.federations)) == (6, 2, 12)
    assert gain_rows(table, "norm").number == 6
    assert gain_rows(table, "norm").weights.tolist() == [0.5] * 12


def test_federations_are_told_apart_by_origin_and_metric(given, tmp_path):
    path = write_table(tmp_path / "t.csv", families=2, each=2, seed=0, noise=0.02)
    rows = list(csv.DictReader(path.open()))
    for row in rows:
        row["origin"] = "phantom" if row["family"] == "family 0" else ""
        row["metric"] = "accuracy" if row["federation"] == "1_1" else "dice"
        row["converged"] = "no" if row["methods"] == "fedfa" else "yes"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    table = given(path)
    assert {one.name for one in table.of_origin(PHANTOM).federations} == {"0_0", "0_1"}
    assert {one.name for one in table.of_origin(REAL).federations} == {"1_0", "1_1"}
    assert {one.name for one in table.scored_by("accuracy").federations} == {"1_1"}
    assert all(one.unconverged == {"fedfa"} for one in table.federations)


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
