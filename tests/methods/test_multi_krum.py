"""Multi-Krum against Blanchard et al. 2017."""

from __future__ import annotations

import numpy as np
import pytest
from krum_scores import clamped, scores
from reference import assert_models, mean, same
from robust import PLAN, SITES, by_hand

from medfedaug.errors import ConfigError, RunFailed
from medfedaug.methods import build_methods


@pytest.mark.parametrize("keep", [0, 2])
def test_the_model_is_the_mean_of_those_with_the_smallest_scores(federate, keep):
    def multi_krum(models, names, weights, network):
        parameters = dict(network.named_parameters())
        best = np.argsort(scores(models, parameters, 1))[: keep or len(models) - 1]
        chosen = [models[index] for index in best]
        return clamped(mean(chosen, [1] * len(chosen)), models, parameters, 1)

    run = federate(
        "multi_krum", None, SITES, {"multi_krum": {"keep": keep}}, network="reference_convolutional"
    )
    assert_models(run, by_hand(run, multi_krum))
    assert len(run.server.rounds[0]["methods"]["multi_krum"]["chosen"]) == (keep or 4)


def test_the_mean_of_one_is_krum(federate):
    one = federate("multi_krum", None, SITES, {"multi_krum": {"keep": 1}}, rounds=2)
    assert same(federate("krum", None, SITES, rounds=2).models[-1], one.models[-1])


def test_what_is_kept_must_be_there(federate):
    with pytest.raises(ConfigError, match="multi_krum: keep cannot be negative"):
        build_methods([{"name": "multi_krum", "args": {"keep": -1}}])
    with pytest.raises(RunFailed, match="round 2: 4 of 5 needed updates"):
        federate("multi_krum", PLAN, SITES)
