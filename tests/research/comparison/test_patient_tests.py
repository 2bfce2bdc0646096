"""Tests of differences over patients, against their definitions."""

import itertools
import math
from statistics import fmean, stdev

import numpy as np
import pytest

from medfedaug.metrics.significance import detectable_difference
from medfedaug.research.comparison import paired_tests
from medfedaug.research.comparison.paired_tests import compare_patients, rare_loss_test, sign_flip_test


def share_as_extreme(differences, shift):
    """p(shift) by the definition: of all assignments of signs, those whose mean is as far from 0."""
    moved = [d - shift for d in differences]
    observed = abs(fmean(moved)) - 1e-12
    signs = list(itertools.product((1, -1), repeat=len(moved)))
    return sum(abs(fmean(s * d for s, d in zip(row, moved, strict=True))) >= observed for row in signs) / len(
        signs
    )


def test_sign_flip_test_against_all_assignments_of_signs():
    differences = [0.3, -0.1, 0.2, 0.2, -0.2, 0.0, 0.7, 0.3 + 1e-15]
    p, low, high = sign_flip_test(differences)
    assert p == share_as_extreme(differences, 0)
    # The interval is what the test accepts, to its ends.
    for inside, outside in ((low + 1e-6, low - 1e-6), (high - 1e-6, high + 1e-6)):
        assert share_as_extreme(differences, inside) > 0.05 >= share_as_extreme(differences, outside)
    mirrored = sign_flip_test([-d for d in differences])
    assert mirrored == pytest.approx((p, -high, -low), abs=1e-12)


@pytest.mark.parametrize("n", [6, 9, 12, 13, 14, 30])
def test_p_is_at_most_5_percent_where_the_interval_leaves_out_zero_and_only_there(n):
    rng, found = np.random.default_rng(n), set()
    for shift in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, -0.6):
        for digits in (1, 6):  # with ties and without
            p, low, high = sign_flip_test(np.round(rng.normal(shift, 0.7, n), digits))
            assert (p <= 0.05) == (low > 0 or high < 0)
            found.add(p <= 0.05)
    assert found == {False, True}


def test_sign_flip_test_of_many_differences_joins_its_exact_values(monkeypatch):
    differences = np.random.default_rng(3).normal(0.3, 1, 12)
    exact = sign_flip_test(differences)
    monkeypatch.setattr(paired_tests, "_ASSIGNMENTS", 4000)
    assert sign_flip_test(differences) == pytest.approx(exact, abs=0.03)
    values = np.random.default_rng(0).normal(0, 1, 4000)
    half = 1.96 * values.std() / math.sqrt(4000)
    _, low, high = sign_flip_test(values)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.003)


def test_sign_flip_test_at_its_edges():
    assert sign_flip_test([0.1] * 6) == pytest.approx((2 / 64, 0.1, 0.1), abs=1e-15)
    assert sign_flip_test([0.0] * 6) == (1, 0, 0)
    # Of 32 assignments two always count: no outcome of five differences is below 5 %.
    p, low, high = sign_flip_test([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (p, low, high) == (2 / 32, -math.inf, math.inf)


def test_compare_patients_puts_the_numbers_together():
    ours, theirs = [0.7, 0.8, 0.6, 0.9, 0.5], [0.6, 0.5, 0.7, 0.5, 0.5]
    test = compare_patients(ours, theirs)
    assert test.difference == pytest.approx(0.14)
    assert (test.patients, test.better, test.worse) == (5, 3, 1)
    # 1, 3, -1 and 4 tenths: 3 of 16 assignments have a sum of 7 or more, 3 of -7 or less.
    assert test.p == 6 / 16
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    assert (test.p, test.low, test.high) == sign_flip_test(differences)
    assert test.detectable == pytest.approx(detectable_difference(stdev(differences), 5))


@pytest.mark.parametrize("patients", [3, 20, 120])
def test_rare_losses_against_draws_of_the_weights(patients):
    rng = np.random.default_rng(0)
    differences = rng.normal(0.03, 0.1, patients)
    weights = rng.dirichlet(np.ones(patients + 1), 20_000)
    share = np.mean(weights @ np.append(differences, -0.6) <= 0)
    assert rare_loss_test(differences, -0.6) == pytest.approx(min(1, 2 * share), abs=0.02)


def test_rare_losses_at_their_edges():
    assert rare_loss_test([-0.1, 0.0], -0.5) == 1
    assert rare_loss_test([0.5, 0.5], 0.0) == pytest.approx(0, abs=1e-6)
    assert rare_loss_test([0.1] * 30, -0.4) == pytest.approx(2 * 0.8**30, rel=1e-6)
