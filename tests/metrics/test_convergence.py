"""Rounds end where the score stands still, and not where it still rises through noise."""

import random

import pytest

from medfedaug.metrics.significance import has_stalled, is_converged


def ends(curve, patience, **options):
    """Round after which a run with these scores ends; ``None`` where it makes all."""
    return next((n for n in range(1, len(curve) + 1) if has_stalled(curve[:n], patience, **options)), None)


@pytest.mark.parametrize("patience", [3, 5, 8])
@pytest.mark.parametrize("higher", [True, False])
def test_a_rising_curve_goes_on_and_a_flat_one_ends(patience, higher):
    rising = [0.01 * n if higher else 1 - 0.01 * n for n in range(60)]
    assert ends(rising, patience, higher_is_better=higher) is None
    assert ends(rising, patience, higher_is_better=not higher) == 2 * patience
    assert ends([0.7] * 60, patience, higher_is_better=higher) == 2 * patience


def test_noise_alone_is_no_gain():
    draw = random.Random(0)
    stopped = [ends([0.7 + draw.gauss(0, 0.02) for _ in range(10)], 5) for _ in range(2000)]
    # By the test's level one in twenty flat curves looks as if it rose.
    assert 0.93 < sum(end == 10 for end in stopped) / 2000 < 0.97


def test_a_gain_beyond_the_noise_goes_on():
    draw = random.Random(0)
    curves = [[0.5 + 0.02 * n + draw.gauss(0, 0.01) for n in range(10)] for _ in range(500)]
    assert sum(ends(curve, 5) is None for curve in curves) > 490


@pytest.mark.parametrize("peak", range(10))
def test_no_single_peak_makes_a_rising_curve_converge(peak):
    curve = [0.05 * n for n in range(10)]
    curve[peak] = 0.9
    assert not is_converged(curve)


@pytest.mark.parametrize("dip", range(10))
def test_no_single_dip_makes_a_flat_curve_rise(dip):
    curve = [0.6] * 10
    curve[dip] = 0.0
    assert is_converged(curve)


def test_fewer_than_three_rounds_do_not_converge():
    assert not is_converged([0.6, 0.6])
