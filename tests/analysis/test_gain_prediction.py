import csv

import numpy as np
import pytest
from calibrations import fingerprint, write_table

from medfedaug.analysis.calibration_table import PHANTOM, REAL, Calibration, features
from medfedaug.analysis.gain_prediction import GainModel
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
    assert norm.mean_at(found["C"]) == pytest.approx(0.1 * np.log1p(7.5 / np.sqrt(2)), abs=0.03)
    assert norm.mean_at(found["C"]) > norm.mean_at(found["A"]) + 0.02
    assert norm.explanation.startswith("a line: +0.")
    assert "appearance +0.0" in norm.explanation
    assert fedfa.mean_at(found["C"]) == 0
    assert fedfa.explanation == "always 0"
    alone = GainModel(table, "single")
    assert alone.mean_at(found["A"]) == pytest.approx(-0.1, abs=0.01)
    assert alone.explanation.startswith("always the mean of all federations, -0.")


def test_an_interval_that_few_federations_cannot_give_is_none(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=3, each=1, seed=0, noise=0.02))
    found = GainModel(table, "norm", level="mean").predict(features(sites(0.1))["A"], [10])
    assert found.interval80 is None
    assert found.interval95 is None
    assert found.to_dict()["low80"] is None


def test_what_is_unlike_the_table_is_said_and_has_a_wider_interval(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=6, each=4, seed=1, noise=0.02))
    model = GainModel(table, "norm")
    usual = model.predict(features(sites(0.1))["C"], [10])
    strange = model.predict(
        features([*sites(0.1)[:2], fingerprint("C", mean=0.4, edge=20, noise=0.2, size=0.5)])["C"], [10]
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


def test_few_test_patients_make_an_interval_wider_as_chance_does(given, tmp_path):
    table = given(write_table(tmp_path / "t.csv", families=6, each=4, seed=1, noise=0.02))
    found = features(sites(0.1))
    for level, x in (("site", found["C"]), ("mean", np.mean(list(found.values()), axis=0))):
        model, number = GainModel(table, "norm", level=level), 1 if level == "site" else 3
        widths = [np.diff(model.predict(x, [tested] * number).interval80)[0] for tested in (1, 2, 10**9)]
        # By 0.1 between patients: the squares of what is beyond the model's own error are as 1 to 1/2.
        own = widths[2] ** 2
        assert (widths[0] ** 2 - own) / (widths[1] ** 2 - own) == pytest.approx(2, rel=1e-3)
        assert widths[0] > 1.3 * widths[2]


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
    assert table.of_family("family 1").families == ["family 1"]
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
