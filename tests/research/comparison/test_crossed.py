"""The test over trainings and patients together, and Holm's adjustment, against references of their own."""

import math

import numpy as np
import pytest
from scipy import stats

from medfedaug.research.comparison.paired_tests import crossed_test, holm


def reference(table: np.ndarray) -> tuple[float, float]:
    """Mean and p-value, from the equations."""
    seeds, patients = table.shape
    mean = table.mean()
    a = np.var(table.mean(axis=1), ddof=1) / seeds
    b = np.var(table.mean(axis=0), ddof=1) / patients
    freedom = (a + b) ** 2 / (a**2 / (seeds - 1) + b**2 / (patients - 1))
    t = mean / math.sqrt(a + b)
    g = stats.skew(table.mean(axis=0), bias=False) * (b / (a + b)) ** 1.5 / math.sqrt(patients)
    hall = t + g * t**2 / 3 + g**2 * t**3 / 27 + g / 6
    return mean, max(2 * stats.t.sf(abs(value), freedom) for value in (t, hall))


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_equation_and_its_interval_says_the_same(seed):
    rng = np.random.default_rng(seed)
    shape = (2 + seed % 4, 3 + 7 * seed)
    table = rng.lognormal(0, 1, shape[1]) + rng.normal(-1.2, 0.3, (shape[0], 1)) + rng.normal(0, 0.2, shape)
    table *= (-1) ** seed
    found = crossed_test(table)
    assert (found.difference, found.p) == pytest.approx(reference(table))
    assert (found.trainings, found.patients) == shape
    assert found.low < found.difference < found.high
    assert (found.p <= 0.05) == (found.low > 0 or found.high < 0)
    # The interval holds the differences that the test does not reject: at its ends p is 0.05 or more.
    for end, outside in ((found.low, -1), (found.high, 1)):
        assert crossed_test(table - end).p == pytest.approx(0.05, abs=1e-6)
        assert crossed_test(table - end - outside * 0.01 * (found.high - found.low)).p < 0.05


def test_a_mirrored_table_has_the_mirrored_interval():
    table = np.random.default_rng(3).exponential(1, (5, 30))
    one, other = crossed_test(table), crossed_test(-table)
    assert (one.low, one.high, one.p) == pytest.approx((-other.high, -other.low, other.p))


def test_what_no_training_scored_is_left_out_and_single_gaps_are_means_of_the_rest():
    table = np.random.default_rng(0).normal(0.3, 0.1, (4, 12))
    whole = crossed_test(table)
    assert crossed_test(np.insert(table, 5, np.nan, axis=1)) == whole
    table[2, 3] = np.nan
    gap = crossed_test(table)
    assert gap.difference == pytest.approx(np.nanmean(table, axis=0).mean())
    assert gap.patients == 12


@pytest.mark.parametrize(
    "table",
    [[[0.1, 0.2, 0.3]], [[0.1, 0.2], [0.1, 0.3]], [[0.1] * 5] * 3, [[math.nan] * 4, [0.1] * 4], [], [[], []]],
)
def test_there_is_no_test_of_too_little_or_of_what_does_not_vary(table):
    assert crossed_test(table) is None


def test_patients_without_any_variation_leave_that_of_trainings():
    table = np.tile([[0.1], [0.12], [0.09]], (1, 20))
    found = crossed_test(table)
    assert found.p == pytest.approx(stats.ttest_1samp(table[:, 0], 0).pvalue)


def test_the_larger_variance_of_the_two_decides():
    """A training that moves all patients alike is one number, however many patients there are."""
    moved = np.array([[0.5], [-0.4], [0.3], [-0.2], [0.45]])
    few = crossed_test(moved + np.zeros((5, 10)) + np.linspace(-1e-3, 1e-3, 10))
    many = crossed_test(moved + np.zeros((5, 1000)) + np.linspace(-1e-3, 1e-3, 1000))
    assert few.p == pytest.approx(many.p, abs=1e-3)
    assert many.p > 0.3


def test_holm_is_the_textbooks_step_down():
    p = [0.003, 0.2, 0.01, 0.04, 0.01]
    expected = [0.015, 0.2, 0.04, 0.08, 0.04]
    assert holm(p) == pytest.approx(expected)
    assert holm([]) == []
    assert holm([0.5, 0.9]) == [1.0, 1.0]
