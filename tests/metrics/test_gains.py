"""The gain of a method in few trainings, with the chance of seeds and of patients."""

from statistics import fmean, variance

import numpy as np
import pytest

from medfedaug.metrics.significance import GAIN_CONFIDENCE, Difference, mean_gain, t_quantile


def trainings(means, error=0.0, patients=1):
    """Trainings with equal sites A and B."""
    return [dict.fromkeys("AB", Difference(mean, error or None, patients)) for mean in means]


def test_one_method_has_the_interval_of_its_seeds():
    gain = mean_gain(trainings([0.1, 0.14]))
    half = t_quantile(GAIN_CONFIDENCE, 1) * (variance([0.1, 0.14]) / 2) ** 0.5
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.12, 0.12 - half, 0.12 + half))


def test_other_methods_say_how_much_seeds_differ():
    alone = mean_gain(trainings([0.1, 0.14]))
    more = mean_gain(trainings([0.1, 0.14]), [trainings([0.0, 0.04])] * 4)
    assert more.mean == alone.mean
    assert more.high - more.low < (alone.high - alone.low) / 2
    half = t_quantile(GAIN_CONFIDENCE, 4 * 5 / 8) * (variance([0.1, 0.14]) / 2) ** 0.5
    assert more.high - more.mean == pytest.approx(half)


def test_patients_count_once_for_all_seeds():
    gain = mean_gain(trainings([0.1, 0.1], error=0.02, patients=5))
    half = t_quantile(GAIN_CONFIDENCE, 8) * (2 * 0.02**2) ** 0.5 / 2
    assert gain.high - gain.mean == pytest.approx(half)


def test_a_site_with_one_patient_has_the_spread_of_the_others():
    sites = {"A": Difference(0.1, 0.02, 4), "B": Difference(0.1)}
    gain = mean_gain([sites, sites])
    half = t_quantile(GAIN_CONFIDENCE, 3) * (0.02**2 + 4 * 0.02**2) ** 0.5 / 2
    assert gain.high - gain.mean == pytest.approx(half)


def test_sites_of_one_patient_each_differ_by_their_patients():
    sites = {"A": Difference(0.1), "B": Difference(0.2), "C": Difference(0.3)}
    gain = mean_gain([sites, sites])
    half = t_quantile(GAIN_CONFIDENCE, 2) * (variance([0.1, 0.2, 0.3]) / 3) ** 0.5
    assert gain.high - gain.mean == pytest.approx(half)


def test_without_variation_there_is_no_interval():
    assert mean_gain(trainings([0.1, 0.1])).low is None


@pytest.mark.parametrize(("sites", "patients", "methods"), [(3, 1, 5), (4, 4, 1), (2, 6, 3)])
def test_the_interval_covers_the_true_gain(sites, patients, methods):
    R, covered, tables = np.random.default_rng(7), 0, 250
    for _ in range(tables):
        reference, made = R.normal(0, 0.05, 2), []
        for method in range(methods):
            people = R.normal(0, 0.06, (sites, patients))
            true = 0.1 if method == 0 else 0.0
            tables_of = [
                true + R.normal(0, 0.05) - reference[seed] + people + R.normal(0, 0.02, people.shape)
                for seed in range(2)
            ]
            errors = patients > 1
            made.append(
                [
                    {
                        site: Difference(
                            fmean(row), row.std(ddof=1) / patients**0.5 if errors else None, patients
                        )
                        for site, row in enumerate(table)
                    }
                    for table in tables_of
                ]
            )
        gain = mean_gain(made[0], made[1:])
        covered += gain.low <= 0.1 <= gain.high
    assert covered >= 0.86 * tables
