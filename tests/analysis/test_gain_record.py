"""Expected gains, and the file of recorded ones."""

import numpy as np
import pytest

from medfedaug.analysis.gain_record import Expected, Rule, find_record
from medfedaug.errors import ConfigError


def test_fewer_test_patients_never_give_a_narrower_interval():
    found, last = Expected(0.1, (-0.1, 0.3), (-0.3, 0.5)), 0.0
    for deviation in (0.0, 0.05, 0.1, 0.2):
        wider = found.widened(deviation)
        width = wider.interval80[1] - wider.interval80[0]
        assert width == pytest.approx(2 * np.hypot(0.2, 1.2816 * deviation))
        assert width >= last
        last = width
    assert found.widened(0.4).interval80 is None  # half of the possible gains


def test_a_gain_over_fedavg_is_what_averaging_lost_and_over_training_alone_it_falls():
    rule = Rule(slope=0.5, highest=0.2, halves=(0.1, None))
    assert rule.predict(0.2, falls=False) == Expected(0.1, (0.0, 0.2), None)
    assert rule.predict(-0.2, falls=False).mean == 0
    assert rule.predict(-0.2, falls=True).mean == 0.1


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is no record of gains"), ('{"batch": {"dice": {"seeds": "many"}}}', "is no record of gains")],
)
def test_a_file_of_something_else_is_refused_in_one_line(tmp_path, content, words):
    (tmp_path / "own.json").write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        find_record("dice", path=tmp_path / "own.json")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        find_record("dice", path=tmp_path / "none.json")
