"""The two rules of a monitor: their p-values and evidence by definition, their rates, and what they find."""

import numpy as np
import pytest
from scipy.stats import binomtest

from medfedaug.hospital.assurance.monitoring import Course, case_p_value, distances, fewest_cases

MEASURES = 4


def stream(seed, cases, measures=MEASURES):
    """Correlated measures with heavy tails, in a random order."""
    rng = np.random.default_rng(seed)
    return rng.standard_t(4, (cases, measures)) @ rng.normal(size=(measures, measures))


def first_alarm(values, accepted, rate):
    """Return the number of the later case at which the rule over time gives an alarm; 0 for none."""
    course = Course(values[:accepted], rate)
    for number, case in enumerate(values[accepted:], start=1):
        course.add(case)
        if course.shares.max() >= 1:
            return number
    return 0


def test_the_distance_is_that_of_mahalanobis_with_a_ridge():
    values = stream(0, 30)
    z = (values - values.mean(axis=0)) / values.std(axis=0)
    inverse = np.linalg.inv(np.corrcoef(values.T) + 0.1 * np.eye(MEASURES))
    np.testing.assert_allclose(distances(values), [x @ inverse @ x for x in z], rtol=1e-6)


def test_the_p_value_is_the_share_of_cases_at_least_as_far_away():
    values = stream(1, 20)
    apart = distances(values)
    expected = sum(apart[i] >= apart[19] for i in range(20)) / 20
    assert case_p_value(values[:19], values[19]) == pytest.approx(expected)


def test_a_case_like_all_others_has_the_largest_p_value():
    assert case_p_value(np.ones((30, MEASURES)), np.ones(MEASURES)) == 1


def test_a_constant_measure_that_changes_gives_the_smallest_p_value():
    values = stream(2, 50)
    values[:, 0] = 3.0
    case = values[0].copy()
    case[0] = 3.1
    assert case_p_value(values, case) == pytest.approx(1 / 51)


@pytest.mark.parametrize(("rate", "cases"), [(10, 99), (50, 19), (30, 33)])
def test_a_rate_needs_so_many_accepted_cases(rate, cases):
    assert fewest_cases(rate) == cases


def test_the_evidence_is_the_mean_of_shiryaev_roberts_statistics():
    """With distinct values, against sums over all moments at which a change may have begun."""
    values, accepted = stream(3, 26, measures=1), 20
    course = Course(values[:accepted], 1.0)
    ps = []
    for number in range(accepted, len(values)):
        course.add(values[number])
        tie = np.random.default_rng(number + 1).uniform(1e-12, 1 - 1e-12, 2)[0]
        ps.append((sum(values[i, 0] < values[number, 0] for i in range(number)) + tie) / (number + 1))
    sides = {e: ([e * p ** (e - 1) for p in ps], [e * (1 - p) ** (e - 1) for p in ps]) for e in (0.25, 0.6)}
    bets = [side for both in sides.values() for side in both]
    bets.append([(low + high) / 2 for low, high in zip(*sides[0.25], strict=True)])
    expected = np.mean([sum(np.prod(f[s:]) for s in range(len(f))) for f in bets])
    assert course.shares[0] == pytest.approx(expected / 2 / 1000, rel=1e-9)  # two: the measure, the distance


def test_a_drift_of_one_measure_is_found_within_twenty_cases():
    values = stream(4, 120)
    values[100:, 2] += 4 * values[:100, 2].std()
    assert 1 <= first_alarm(values, 100, rate=1.0) <= 20


def test_a_wider_spread_is_found_within_fifty_cases():
    values = stream(5, 150)
    values[100:] *= 4
    assert 1 <= first_alarm(values, 100, rate=1.0) <= 50


@pytest.mark.slow
def test_the_rule_by_case_has_its_rate():
    """Of exchangeable cases with 39 accepted ones, p ≤ 0.05 has exactly the probability 0.05."""
    trials = 4000
    alarms = 0
    for seed in range(trials):
        values = stream(seed, 40)
        alarms += case_p_value(values[:39], values[39]) <= 0.05 + 1e-12
    low, high = binomtest(alarms, trials).proportion_ci(0.999)
    assert low <= 0.05 <= high


@pytest.mark.slow
def test_the_rule_over_time_gives_no_more_false_alarms_than_stated():
    """At most n rate / 1000 of the streams of n cases: here 100 x 4 / 1000."""
    trials = 150
    alarms = sum(first_alarm(stream(seed, 150), 50, rate=4.0) > 0 for seed in range(trials))
    low, _ = binomtest(alarms, trials).proportion_ci(0.999)
    assert low <= 0.4


@pytest.mark.slow
def test_p_values_over_time_are_uniform_and_independent():
    """The evidence has the mean t after t cases, which only such p-values give; capped bets have variance."""
    seen = []
    for seed in range(400):
        values = stream(seed, 40, measures=1)
        course = Course(values[:20], 1.0)
        for case in values[20:25]:
            course.add(case)
        seen.append(course.evidence[0, 1])  # ε = 0.6: its bet has a finite variance
    assert np.mean(seen) == pytest.approx(5, abs=4 * np.std(seen) / np.sqrt(len(seen)))
