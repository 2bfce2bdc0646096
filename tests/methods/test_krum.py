"""Krum against Blanchard et al. 2017."""

from __future__ import annotations

import numpy as np
import pytest
from krum_scores import clamped, scores
from reference import assert_models
from robust import SITES, by_hand

from medfedaug.errors import ConfigError, RunFailed
from medfedaug.methods import build_methods


def test_the_model_is_that_of_the_site_with_the_smallest_score(federate):
    chosen = []

    def krum(models, names, weights, network):
        parameters = dict(network.named_parameters())
        best = int(np.argmin(scores(models, parameters, 1)))
        chosen.append(names[best])
        return clamped(models[best], models, parameters, 1)

    run = federate("krum", None, SITES, network="reference_convolutional")
    assert_models(run, by_hand(run, krum))
    assert [entry["methods"]["krum"]["chosen"] for entry in run.server.rounds] == [[c] for c in chosen]


def test_krum_needs_two_more_honest_sites_than_twice_the_hostile_ones(federate):
    with pytest.raises(RunFailed, match="5 of the sites can train; the method needs 7"):
        federate("krum", None, SITES, {"krum": {"hostile": 2}})
    with pytest.raises(ConfigError, match="krum: hostile must be at least 1"):
        build_methods([{"name": "krum", "args": {"hostile": -1}}])
