"""The record that `prospect` predicts from: gains after pilots, judged with families left out."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from calibration_table import PHANTOM, REAL, TABLE, Calibration
from calibrations import write_table
from gain_model import GainModel, GainRows, gain_rows, recorded_rows
from judge_prospect import write_record
from prediction_judge import judge_rows, judge_table

from medfedaug.analysis.gain_record import find_record
from medfedaug.errors import ConfigError


def load(path):
    return Calibration.load([path])


def test_each_gain_is_paired_with_the_pilot_of_another_seed(tmp_path):
    table = load(write_table(tmp_path / "t.csv", families=2, each=2, seed=0, noise=0.02, seeds=3))
    rows = gain_rows(table, "norm")
    assert (len(rows.gains), rows.number) == (4 * 3 * 2, 4)
    ours, *others = (one for one in table.federations if one.name == "0_0")

    def ahead(one, methods):
        return np.mean([one.scores[methods][site] - one.scores["fedavg"][site] for site in "ABC"])

    assert rows.pilot[:2] == pytest.approx([ahead(other, "single") for other in others])
    assert rows.gains[:2] == pytest.approx([ahead(ours, "norm")] * 2)
    # One seed has no pilot of another.
    alone = load(write_table(tmp_path / "t.csv", families=2, each=2, seed=0, noise=0.02))
    assert gain_rows(alone, "norm") is None
    assert recorded_rows(alone, "norm").number == 4


def test_slope_and_intervals_are_those_of_the_formula(tmp_path):
    table = load(write_table(tmp_path / "t.csv", families=4, each=3, seed=1, noise=0.02, seeds=2))
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


def test_the_gain_over_training_alone_falls_with_the_pilot(tmp_path):
    table = load(write_table(tmp_path / "t.csv", families=4, each=3, seed=1, noise=0.005, seeds=2))
    model = GainModel(gain_rows(table, "fedavg", "single"))
    assert model.slope == pytest.approx(1.0, abs=0.1)
    assert model.mean_at(0.08) == pytest.approx(-0.08, abs=0.01)
    assert model.mean_at(-0.08) == pytest.approx(0.08, abs=0.01)


def test_an_interval_of_half_of_the_possible_gains_is_not_known(tmp_path):
    wide = load(write_table(tmp_path / "t.csv", families=4, each=3, seed=1, noise=0.9, seeds=2))
    gain = GainModel(gain_rows(wide, "norm")).predict(0.05)
    assert gain.interval80 is None


def test_seeds_of_a_federation_count_as_one(tmp_path):
    table = load(write_table(tmp_path / "t.csv", families=3, each=2, seed=0, noise=0.02, seeds=2))
    assert (table.number, table.seeds, len(table.federations)) == (6, 2, 12)
    assert gain_rows(table, "norm").number == 6
    assert gain_rows(table, "norm").weights.tolist() == [0.5] * 12


def test_federations_are_told_apart_by_origin_and_metric(tmp_path):
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
    table = load(path)
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
def test_a_damaged_table_is_refused_in_one_line(tmp_path, column, value, words):
    path = write_table(tmp_path / "t.csv", families=2, each=1, seed=0, noise=0.02)
    rows = list(csv.DictReader(path.open()))
    rows[0][column] = value
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ConfigError, match=words) as error:
        load(path)
    assert "\n" not in str(error.value)


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="lacks the column federation"):
        load(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        Calibration.load([tmp_path / "none.csv"])


def rows(families, gain, each=4, seed=0):
    """Gains that follow a function of family and pilot."""
    R = np.random.RandomState(seed)
    names = np.repeat([f"family {k}" for k in range(families)], each)
    pilot = R.uniform(-0.1, 0.2, families * each)
    gains = np.array([gain(name, p) + R.normal(0, 0.01) for name, p in zip(names, pilot, strict=True)])
    return GainRows(pilot, gains, names, np.array([str(k) for k in range(len(names))]), falls=False)


def judged(table):
    return judge_rows(table, "norm", "fedavg", "mean")


def test_a_law_is_said_and_chance_is_not():
    """A prediction that holds fails by chance in some tables, since it must hold in each family."""
    laws = [judged(rows(11, lambda family, pilot: max(pilot, 0.0), seed=seed)) for seed in range(10)]
    assert sum(law.is_said for law in laws) >= 5
    assert all(law.beats and law.error < 0.5 * law.error_of_zero for law in laws)
    assert all(law.is_said == (law.holds and law.beats) for law in laws)
    chances = [judged(rows(11, lambda family, pilot: 0.0, seed=seed)) for seed in range(10)]
    assert not any(chance.is_said for chance in chances)


def test_one_family_outside_is_enough_for_silence():
    """Pooled over all families 91% of the gains would lie in the intervals."""
    odd = judged(rows(11, lambda family, pilot: -0.3 if family == "family 3" else max(pilot, 0.0)))
    record = odd.pilot[0]
    assert record.coverage >= 0.7
    assert (record.worst, record.inside["family 3"]) == ("family 3", 0.0)
    assert not odd.holds
    assert not odd.is_said


def test_what_one_family_carries_alone_does_not_beat_the_yardstick():
    carried = judged(rows(11, lambda family, pilot: 0.9 * pilot if family == "family 3" else 0.0))
    assert not carried.beats


def test_the_interval_score_is_the_width_and_what_is_beyond():
    errors = judged(rows(11, lambda family, pilot: max(pilot, 0.0)))
    for record in (*errors.pilot, *errors.yardstick):
        for family, inside in record.inside.items():
            assert record.loss[family] == pytest.approx(record.width[family]) or inside < 1
            assert record.loss[family] >= record.width[family]


def test_few_federations_or_families_show_nothing():
    for families, each in ((9, 4), (10, 1), (2, 20)):
        assert not judged(rows(families, lambda family, pilot: max(pilot, 0.0), each=each)).is_said


def test_a_table_is_judged_for_each_method_and_level(tmp_path):
    path = write_table(tmp_path / "t.csv", families=11, each=2, seed=3, noise=0.01, seeds=2)
    records = {(one.methods, one.over, one.level): one for one in judge_table(load(path))}
    assert {key[:2] for key in records} == {("fedavg", "single"), ("norm", "fedavg"), ("fedfa", "fedavg")}
    assert len(records) == 9
    assert records["norm", "fedavg", "mean"].is_said
    assert not records["fedfa", "fedavg", "mean"].is_said
    path = write_table(tmp_path / "t.csv", families=11, each=2, seed=3, noise=0.01)
    assert judge_table(load(path)) == []  # no federation has a second seed


def test_the_record_of_the_package_is_that_of_the_table(tmp_path):
    """The page docs/results/prospect names these claims."""
    write_record([TABLE], tmp_path / "record.json")
    for norm, number in (("batch", 93), ("instance", 11), ("group", 0)):
        own = find_record("dice", norm)
        assert own == find_record("dice", norm, tmp_path / "record.json")
        assert own.number == number
    ruled = {(one.methods, one.level) for one in find_record("dice").claims if one.rule is not None}
    assert ruled == {("fedrdn", "site"), ("fedrdn", "mean"), ("pooled", "worst")}
