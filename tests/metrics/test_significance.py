"""Tests of differences, against equations and printed tables."""

import math

import numpy as np
import pytest

from medfedaug.metrics.significance import (
    _power,
    detectable_difference,
    paired_t_test,
    t_quantile,
    t_two_sided,
)


@pytest.mark.parametrize(("df", "t", "p"), [(1, 12.7062, 0.05), (4, 4.60409, 0.01), (120, 1.97993, 0.05)])
def test_t_distribution_against_the_printed_tables(df, t, p):
    assert t_two_sided(t, df) == pytest.approx(p, rel=2e-5)
    assert t_two_sided(-t, df) == t_two_sided(t, df)
    assert t_quantile(1 - p, df) == pytest.approx(t, rel=1e-5)


def test_paired_t_test_on_students_own_data():
    # "Student" 1908, hours of sleep; t = -4.0621, df = 9.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    test = paired_t_test(first, second)
    assert test.p == pytest.approx(0.002833, abs=5e-7)
    assert (test.difference, test.low, test.high) == pytest.approx((-1.58, -2.4598858, -0.7001142), abs=1e-7)
    assert test.pairs == 10


def test_paired_t_test_at_its_edges():
    assert paired_t_test([0.5, 0.6], [0.5, 0.6]).p == 1
    assert paired_t_test([1.0, 2.0], [0.5, 1.5]).p == 0
    assert t_two_sided(math.inf, 4) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    ("noncentrality", "df", "power"),
    [
        (1 / math.sqrt(2 / 20), 38, 0.8689528),  # R: power.t.test(n = 20, delta = 1, sd = 1)
        (
            1 / math.sqrt(2 / 22.02110),
            42,
            0.90,
        ),  # R: power.t.test(delta = 1, power = .90), df to the next whole
        (0.0, 7, 0.05),
    ],
)
def test_power_against_printed_values(noncentrality, df, power):
    assert _power(noncentrality, t_quantile(0.95, df), df) == pytest.approx(power, abs=2e-4)


def test_detectable_difference_is_found_four_times_in_five():
    rng = np.random.default_rng(0)
    n, spread = 6, 0.07
    shift = detectable_difference(spread, n)
    samples = rng.normal(shift, spread, (200_000, n))
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / math.sqrt(n))
    found = np.mean(np.abs(t) > t_quantile(0.95, n - 1))
    assert found == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / len(t)))
    assert detectable_difference(2 * spread, n) == pytest.approx(2 * shift, rel=1e-8)
    assert detectable_difference(spread, n, power=0.9) > shift > detectable_difference(spread, n + 1)
    assert detectable_difference(1, 100_000) * math.sqrt(100_000) == pytest.approx(2.8016, rel=1e-4)  # z + z
    assert detectable_difference(0.0, n) == 0
