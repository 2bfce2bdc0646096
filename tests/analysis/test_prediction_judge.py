"""Predictions of families that were left out, against gains that follow a law."""

import numpy as np
import pytest
from calibrations import write_table

from medfedaug.analysis.calibration_table import Calibration
from medfedaug.analysis.gain_prediction import GainRows
from medfedaug.analysis.prediction_judge import judge_rows, judge_table


def rows(families, gain, each=4, seed=0):
    """Gains that follow a function of family and pilot."""
    R = np.random.RandomState(seed)
    names = np.repeat([f"family {k}" for k in range(families)], each)
    pilot = R.uniform(-0.1, 0.2, families * each)
    gains = np.array([gain(name, p) + R.normal(0, 0.01) for name, p in zip(names, pilot, strict=True)])
    return GainRows(pilot, gains, names, np.array([str(k) for k in range(len(names))]), falls=False)


def judged(found):
    return judge_rows(found, "norm", "fedavg", "mean")


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
    found = judged(rows(11, lambda family, pilot: max(pilot, 0.0)))
    for record in (*found.pilot, *found.yardstick):
        for family, inside in record.inside.items():
            assert record.loss[family] == pytest.approx(record.width[family]) or inside < 1
            assert record.loss[family] >= record.width[family]


def test_few_federations_or_families_show_nothing():
    for families, each in ((9, 4), (10, 1), (2, 20)):
        assert not judged(rows(families, lambda family, pilot: max(pilot, 0.0), each=each)).is_said


def test_a_table_is_judged_for_each_method_and_level(tmp_path, monkeypatch):
    monkeypatch.setattr("medfedaug.analysis.calibration_table._TABLE", "analysis/none.csv")
    path = write_table(tmp_path / "t.csv", families=11, each=2, seed=3, noise=0.01, seeds=2)
    found = {(one.methods, one.over, one.level): one for one in judge_table(Calibration.load([path]))}
    assert {key[:2] for key in found} == {("fedavg", "single"), ("norm", "fedavg"), ("fedfa", "fedavg")}
    assert len(found) == 9
    assert found["norm", "fedavg", "mean"].is_said
    assert not found["fedfa", "fedavg", "mean"].is_said
    path = write_table(tmp_path / "t.csv", families=11, each=2, seed=3, noise=0.01)
    assert judge_table(Calibration.load([path])) == []  # no federation has a second seed


def test_what_the_table_of_the_package_shows():
    """The page docs/results/prospect names these claims."""
    said = {(one.methods, one.level) for one in judge_table(Calibration.load()) if one.is_said}
    assert said == {("fedrdn", "site"), ("fedrdn", "mean"), ("pooled", "worst")}
