import numpy as np
import pytest
import torch

from medfedaug.functional.soft_dice_confidence import soft_dice_confidence
from medfedaug.runs.prediction.case_writer import certainty
from medfedaug.runs.prediction.predictions_file import look_first


def test_soft_dice_confidence_is_its_equation_in_2d_and_3d():
    random = np.random.default_rng(0)
    for shape in ((7, 5), (4, 5, 6)):
        logits = random.normal(size=(3, *shape)) * 3
        logits[2] -= 100  # a class that is nowhere
        shares = np.exp(logits) / np.exp(logits).sum(axis=0)
        label = shares.argmax(axis=0)
        found = soft_dice_confidence(torch.from_numpy(logits), torch.from_numpy(label))
        inside = label == 1
        expected = 2 * shares[1][inside].sum() / (shares[1].sum() + inside.sum())
        assert found[0].item() == pytest.approx(expected, rel=1e-5)
        assert torch.isnan(found[1])
        assert [*certainty(found, ("background", "a", "b"))] == ["a"]
        # Logarithms of probabilities are logits, also of a probability of 0.
        shares[1][0] = 0
        again = soft_dice_confidence(torch.from_numpy(shares).log(), torch.from_numpy(label))
        assert torch.isfinite(again[0])


def test_the_least_sure_case_comes_first_and_one_without_a_finding_before_it():
    cases = {
        "sure": {"confidence": {"a": 0.9, "b": 0.95}},
        "unsure": {"confidence": {"a": 0.99, "b": 0.4}},
        "empty": {"confidence": {}},
    }
    assert look_first(cases) == ["empty", "unsure", "sure"]
    photographs = {"x": {"class": "cat", "probabilities": {"cat": 0.9, "dog": 0.1}}}
    photographs["y"] = {"class": "dog", "probabilities": {"cat": 0.45, "dog": 0.55}}
    assert look_first(photographs) == ["y", "x"]
