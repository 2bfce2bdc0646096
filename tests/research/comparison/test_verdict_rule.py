"""False verdicts in tables without differences (docs/results/verdict has 1,000 tables a row)."""

import numpy as np
import pytest
from verdict_rule import SHAPES, false_verdicts


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_tables_without_differences_have_a_verdict_in_one_of_twenty_at_most(shape):
    for sites, patients in ((2, 10), (5, 24)):
        _, ruled = false_verdicts(shape, sites, patients, 1.0, 100, np.random.default_rng(0))
        assert ruled <= 0.05


def test_twenty_patients_without_a_loss_show_no_gain():
    observed, ruled = false_verdicts("rare 5", 2, 10, 0.0, 4, np.random.default_rng(0))
    assert observed > 0.5
    assert ruled == 0
