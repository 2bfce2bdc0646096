"""The scores that leave a site: exact means over enough patients, or means with noise."""

import random
from itertools import combinations
from statistics import fmean

import pytest

from medfedaug.hospital.privacy import PrivacyPolicy, released_difference, released_scores

CASES = {f"c{n}": n / 20 for n in range(12)}
SCORES = {
    "dice": 0.9,
    "nsd": 0.9,
    "cases": CASES,
    "case_metrics": {"nsd": {**CASES, "c10": None, "c11": None}},
    "classes": {"lesion": {"dice": 0.5}},
    "missed": {"lesion": 1},
}


def test_means_leave_and_nothing_of_a_case_or_class():
    released = released_scores(SCORES, PrivacyPolicy())
    assert released == {
        "dice": pytest.approx(fmean(CASES.values())),
        "nsd": pytest.approx(fmean([*CASES.values()][:10])),
        "cases": {},
        "scored_cases": 12,
    }


@pytest.mark.parametrize(
    ("patients", "note"),
    [
        (dict.fromkeys(CASES, 0), "fewer than 10 patients would be behind it"),
        ({name: n // 2 for n, name in enumerate(CASES)}, "fewer than 10 patients would be behind it"),
        ({name: max(n - 2, 0) for n, name in enumerate(CASES)}, "one patient would have more than 20% of it"),
    ],
)
def test_a_mean_over_too_few_patients_stays(patients, note):
    released = released_scores(SCORES, PrivacyPolicy(), patients)
    assert (released["dice"], released["nsd"], "scored_cases" in released) == (None, None, False)
    assert note in released["note"]


def test_a_metric_with_too_few_patients_stays_alone():
    patients = {name: n // 2 if n < 4 else n for n, name in enumerate(CASES)}  # 8 of 10 have an NSD
    released = released_scores(SCORES, PrivacyPolicy(), patients)
    assert released["dice"] is not None
    assert released["nsd"] is None


@pytest.mark.parametrize(("rare", "leaves"), [(10, True), (9, False)])
def test_a_mean_of_classes_needs_enough_patients_of_each(rare, leaves):
    cases = {f"c{n}": 1.0 for n in range(30)}
    labels = {name: "rare" if n < rare else "common" for n, name in enumerate(cases)}
    scores = {"accuracy": 1.0, "balanced_accuracy": 0.75, "cases": cases}
    released = released_scores(scores, PrivacyPolicy(), None, labels)
    assert released["accuracy"] == 1.0
    assert released["balanced_accuracy"] == (0.75 if leaves else None)


def test_noise_covers_the_means_and_nothing_else_leaves():
    policy = PrivacyPolicy(epsilon=8, score_noise_multiplier=2.0)
    draws = [released_scores(SCORES, policy, generator=random.Random(seed)) for seed in range(400)]
    assert all(set(draw) == {"dice", "nsd", "cases"} for draw in draws)
    exact = fmean([*list(CASES.values())[:10], 0.5, 0.5])  # a case without an NSD counts as the middle
    assert fmean(draw["nsd"] for draw in draws) == pytest.approx(exact, abs=0.05)
    assert len({draw["dice"] for draw in draws}) > 20


def test_a_comparison_leaves_from_enough_patients_on():
    differences = [0.01 * (n % 3) for n in range(10)]
    assert released_difference(differences, PrivacyPolicy(), "patients")["patients"] == 10
    assert released_difference(differences, PrivacyPolicy(min_images=11)) == {}
    assert released_difference(differences, PrivacyPolicy(epsilon=8)) == {}


def test_no_end_of_an_interval_is_a_mean_over_a_few_patients():
    """As the ends of a randomisation test are: each is the mean over the patients whose signs it flips."""
    differences = [0.37**n for n in range(10)]
    released = released_difference(differences, PrivacyPolicy())
    means = [fmean(some) for k in range(1, 10) for some in combinations(differences, k)]
    for end in (released["low"], released["high"]):
        assert min(abs(end - mean) for mean in means) > 1e-6
