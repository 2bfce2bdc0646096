"""Sites that differ from the others are named, and alike ones are not."""

import numpy as np

from medfedaug.research.comparison.shift import Measure, odd_sites


def federation(rng, patients: int, **shifts: float) -> list[Measure]:
    """Measures of alike sites, skewed as sizes are; ``shifts`` in standard deviations move the first."""
    sizes = {site: np.exp(rng.normal(0, 1, patients)) for site in "ABCD"}
    levels = {site: rng.normal(shifts.get(site, 0.0), 1, patients) for site in "ABCD"}
    signs = {site: rng.normal(0.5, 1, patients) for site in "ABCD"}
    return [Measure("level", levels), Measure("size", sizes), Measure("lesion", signs, sign=True)]


def test_at_most_one_in_twenty_federations_of_alike_sites_names_one():
    rng = np.random.default_rng(0)
    named = sum(bool(odd_sites(federation(rng, 5))) for _ in range(100))
    assert named <= 5


def test_a_site_that_differs_is_named_with_its_measure():
    rng = np.random.default_rng(0)
    found = [odd_sites(federation(rng, 10, C=3.0)) for _ in range(20)]
    assert sum([(odd.site, odd.what) for odd in odds] == [("C", "level")] for odds in found) >= 18


def test_a_sign_of_all_sites_makes_none_odd():
    dark = {site: np.full(8, -0.3) for site in "ABC"}
    assert odd_sites([Measure("lesion", dark, sign=True)]) == []


def test_a_sign_that_varies_within_the_others_makes_none_odd():
    mixed = np.array([-0.3, 0.3] * 10)
    assert odd_sites([Measure("lesion", {"A": mixed, "B": mixed, "C": np.full(20, 0.3)}, sign=True)]) == []


def test_of_two_sites_the_difference_is_said_once():
    one, other = np.arange(20) / 100, 1 + np.arange(20) / 100
    (found,) = odd_sites([Measure("level", {"A": one, "B": other})])
    assert str(found) == "B differs from A: level: 1.1 in the median patient, elsewhere 0.095."


def test_few_patients_make_none_odd():
    values = {"A": np.array([1.0, 2.0]), "B": np.array([3.0]), "C": np.array([1000.0, 2000.0])}
    assert odd_sites([Measure("level", values)]) == []
