"""The rules of `medfedaug.hospital.assurance.risk_control`, against float64 references and in simulations."""

import math
import sys

import numpy as np
import pytest
from scipy.stats import binom

from medfedaug.errors import ConfigError
from medfedaug.hospital.assurance.options import LESIONS, VOLUME
from medfedaug.hospital.assurance.risk_control import (
    LEVELS,
    class_curve,
    controlled_level,
    fewest,
    structure_curve,
)


def random_losses(number: int, seed: int, hardness: float = 2.0) -> np.ndarray:
    """Losses of patients whose structures have 60 voxels, and more or less certain probabilities."""
    random = np.random.default_rng(seed)
    odds = hardness + random.normal(0, 1.5, (number, 1)) + random.normal(0, 1, (number, 60))
    shares = 1 / (1 + np.exp(-odds))
    return (shares[:, :, None] < LEVELS).mean(axis=1)


@pytest.mark.parametrize("miss", [0.05, 0.1, 0.3])
def test_the_level_is_the_largest_that_keeps_the_promise(miss):
    losses = random_losses(40, seed=1)
    bounds = [(sum(row[j] for row in losses) + 1) / 41 for j in range(len(LEVELS))]
    (expected,) = (j for j in range(len(LEVELS)) if bounds[j] <= miss < [*bounds, 2][j + 1])
    assert controlled_level(losses, miss) == expected


def test_the_bound_of_a_confidence_is_that_of_hoeffding_and_bentkus():
    pytest.importorskip("mapie", reason="pip install 'medfedaug[assurance]'")
    losses, miss, delta = random_losses(60, seed=2), 0.1, 0.2
    fits = []
    for mean in losses.mean(axis=0):
        a = min(mean, miss)
        hoeffding = (a * math.log(a / miss) if a else 0) + (1 - a) * math.log((1 - a) / (1 - miss))
        bentkus = math.e * binom.cdf(math.ceil(60 * mean - 1e-9), 60, miss)
        fits.append(min(math.exp(-60 * hoeffding), bentkus) <= delta)
    assert controlled_level(losses, miss, 1 - delta) == sum(fits) - 1


def test_a_confidence_costs_more_than_the_mean():
    pytest.importorskip("mapie", reason="pip install 'medfedaug[assurance]'")
    losses = random_losses(60, seed=2)
    assert controlled_level(losses, 0.1, 0.9) < controlled_level(losses, 0.1)


@pytest.mark.parametrize(
    ("miss", "confidence"), [(0.1, None), (0.07, None), (1 / 3, None), (0.1, 0.9), (0.2, 0.5)]
)
def test_one_patient_less_than_needed_promises_nothing(miss, confidence):
    if confidence:
        pytest.importorskip("mapie", reason="pip install 'medfedaug[assurance]'")
    perfect = np.zeros((fewest(miss, confidence), len(LEVELS)))
    assert controlled_level(perfect, miss, confidence) == len(LEVELS) - 1
    assert controlled_level(perfect[1:], miss, confidence) is None


def test_without_mapie_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mapie.risk_control.methods", None)
    with pytest.raises(ConfigError, match=r"pip install 'medfedaug\[assurance\]'"):
        controlled_level(np.zeros((30, len(LEVELS))), 0.1, 0.9)


def test_the_missed_volume_is_the_share_of_voxels_below_the_level():
    shares = np.array([[[0.9, 0.2, 0.6, 0.0]]], np.float32)
    truth = np.array([[[True, True, True, False]]])
    curve = structure_curve(shares, shares > 0.5, truth, VOLUME, unit=2.0)
    between = [int(np.searchsorted(LEVELS, share)) for share in (0.0, 0.1, 0.3, 0.7, 0.95)]
    assert curve.loss[between] == pytest.approx([0, 0, 1 / 3, 2 / 3, 1])
    assert curve.size[between].tolist() == [4, 3, 2, 1, 0]
    assert (curve.plain_loss, curve.plain_size, curve.unit) == (pytest.approx(1 / 3), 2, 2.0)


def test_a_voxel_at_the_threshold_is_in_the_map():
    shares, everything = np.full((1, 1, 1), LEVELS[200]), np.ones((1, 1, 1), bool)
    curve = structure_curve(shares, everything, everything, VOLUME)
    assert curve.loss[200:202].tolist() == [0, 1]


def test_a_part_is_found_by_one_of_its_voxels():
    truth = np.zeros((5, 1, 1), bool)
    truth[[0, 1, 4]] = True  # two parts
    shares = np.array([0.9, 0.1, 0.0, 0.0, 0.3], np.float32).reshape(5, 1, 1)
    curve = structure_curve(shares, shares > 0.5, truth, LESIONS)
    between = [int(np.searchsorted(LEVELS, share)) for share in (0.2, 0.5, 0.95)]
    assert curve.loss[between].tolist() == [0, 0.5, 1]
    assert curve.plain_loss == 0.5


def test_sets_of_classes_are_those_of_split_conformal_prediction():
    """The level lies at the k-th smallest probability of the true class, k = ⌊α (n + 1)⌋."""
    random = np.random.default_rng(3)
    shares = random.dirichlet([4, 1, 1], 50).astype(np.float32)
    level = controlled_level(np.stack([class_curve(row, 0).loss for row in shares]), 0.1, binary=True)
    threshold = np.sort(shares[:, 0])[math.floor(0.1 * 51) - 1]
    assert LEVELS[level] <= threshold < LEVELS[level + 1]


# 200 sites, of which each calibrates on its own 30 patients and meets 100 others.
SITES, CALIBRATED, MET = 200, 30, 100


def met(seed: int, confidence: float | None = None, shift: float = 0.0) -> np.ndarray:
    """The mean loss of each site's later patients, at its own threshold."""
    missed = []
    for site in range(SITES):
        level = controlled_level(random_losses(CALIBRATED, seed + site), 0.1, confidence)
        missed.append(random_losses(MET, seed + SITES + site, 2.0 - shift)[:, level].mean())
    return np.array(missed)


@pytest.mark.slow
def test_exchangeable_sites_miss_at_most_what_is_promised_in_the_mean():
    missed = met(seed=1000)
    spread = missed.std(ddof=1) / math.sqrt(SITES)
    assert 0.05 < missed.mean() < 0.1 + 3 * spread


@pytest.mark.slow
def test_at_most_a_tenth_of_the_sites_misses_more_with_a_confidence_of_nine_tenths():
    pytest.importorskip("mapie", reason="pip install 'medfedaug[assurance]'")
    missed = met(seed=2000, confidence=0.9)
    assert (missed > 0.1).mean() < 0.1 + 3 * math.sqrt(0.09 / SITES)


@pytest.mark.slow
def test_patients_of_another_scanner_break_the_promise():
    assert met(seed=3000, shift=1.5).mean() > 0.15
