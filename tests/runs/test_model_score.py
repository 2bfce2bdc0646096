"""Scores and warnings of a model, from the records of its run's test."""

import pytest

from medfedaug.runs.model_score import ModelScore


def record(metric="dice", **sites):
    """A record with a score of each site, or with scores by class."""
    entries = {}
    for site, found in sites.items():
        classes = found if isinstance(found, dict) else {"lesion": found}
        known = [score for score in classes.values() if score is not None]
        entries[site] = {
            metric: sum(known) / len(known) if known else None,
            "classes": {name: {metric: score} for name, score in classes.items()},
        }
    return {"test": {"sites": entries, "mean": {metric: 0.123}}}


def test_a_good_model_has_a_score_and_no_warning():
    found = ModelScore.of(record(A=0.9, B=0.7))
    assert found == ModelScore("test Dice 0.80 (mean of 2 sites, lowest 0.70)", "")


def test_the_score_of_the_site_counts_where_it_has_one():
    of_b = ModelScore.of(record(A=0.9, B=0.2), "B")
    assert of_b.score == "test Dice 0.20 (at B)"
    assert "Dice of only 0.20" in of_b.warning
    assert not ModelScore.of(record(A=0.9, B=0.2), "A").warning
    assert "mean of 2 sites" in ModelScore.of(record(A=0.9, B=0.2), "new").score
    assert "mean of 1 site" in ModelScore.of(record(A=0.9, B=None), "B").score


def test_a_class_that_is_missed_is_named_though_the_mean_is_good():
    found = ModelScore.of(record(A={"organ": 0.95, "lesion": 0.1}, B={"organ": 0.9, "lesion": None}))
    assert found.warning == "in its test the model missed classes: lesion Dice 0.10"


@pytest.mark.parametrize("empty", [{}, {"test": None}, {"test": {"sites": {}, "mean": {}}}, record(A=None)])
def test_a_run_without_a_score_is_warned_of(empty):
    found = ModelScore.of(empty)
    assert found.score == "no test score"
    assert "nobody measured this model" in found.warning


def test_a_classifier_that_gives_one_class_to_all_is_warned_of():
    entry = {"accuracy": 0.5, "classes": {"cat": {"recall": 1.0}, "dog": {"recall": 0.0}}}
    entry["classes"] = {name: {"accuracy": found["recall"]} for name, found in entry["classes"].items()}
    found = ModelScore.of({"test": {"sites": {"A": entry}, "mean": {"accuracy": 0.5}}})
    assert "every test image of a site was given one class" in found.warning
