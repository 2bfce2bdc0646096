"""The trimmed mean against Yin et al. 2018, Algorithm 1, option II."""

import numpy as np
import pytest
import torch
from reference import assert_models
from robust import SITES, by_hand

from medfedaug import functional as F
from medfedaug.errors import ConfigError
from medfedaug.methods import build_methods

SEVEN = {**SITES, "F": 5, "G": 10}


@pytest.mark.parametrize(("hostile", "sites"), [(1, SITES), (2, SITES), (2, SEVEN)])
def test_every_entry_is_the_mean_without_the_outermost(federate, hostile, sites):
    def trimmed(models, names, weights, start):
        values = {key: np.sort([m[key].numpy() for m in models], axis=0) for key in models[0]}
        return {k: torch.from_numpy(v[hostile : len(v) - hostile].mean(axis=0)) for k, v in values.items()}

    settings = {"trimmed_mean": {"hostile": hostile}}
    run = federate("trimmed_mean", None, sites, settings, rounds=2)
    assert_models(run, by_hand(run, trimmed))


def test_a_number_of_hostile_sites_is_asked_for():
    with pytest.raises(ConfigError, match="trimmed_mean: hostile must be at least 1, got 0"):
        build_methods([{"name": "trimmed_mean", "args": {"hostile": 0}}])
    assert torch.equal(F.trimmed_mean(torch.tensor([1.0, 3.0]), 0), torch.tensor(2.0))
