"""The median against Yin et al. 2018, Algorithm 1, option I."""

import numpy as np
import pytest
import torch
from reference import UNEVEN, assert_models
from robust import PLAN, SITES, by_hand

from medfedaug.errors import RunFailed
from medfedaug.federation import run_in_process


def median(models, sites, weights, start):
    return {key: torch.from_numpy(np.median([m[key].numpy() for m in models], axis=0)) for key in models[0]}


def test_every_entry_is_the_sites_median(federate):
    """Rounds of five, four and five sites; their numbers of samples differ and do not count."""
    run = federate("median", PLAN, SITES)
    assert_models(run, by_hand(run, median))


def test_of_two_sites_there_is_no_median(phantom_dir, tiny_config):
    two = ["site_A", "site_B"]
    with pytest.raises(RunFailed, match="2 of the sites can train; the method needs 3"):
        run_in_process(tiny_config("median"), phantom_dir, two, "cpu")


def test_a_round_with_fewer_updates_than_the_method_needs_ends_the_run(federate):
    with pytest.raises(RunFailed, match="round 2: 2 of 3 needed updates"):
        federate("median", UNEVEN, {"A": 5, "B": 5, "C": 5})


def test_one_site_alone_cannot_move_a_median_far():
    from medfedaug import functional as F

    honest = torch.randn(4, 50, dtype=torch.float64)
    for wrong in (1e9, -1e9):
        result = F.coordinate_median(torch.cat([honest, torch.full((1, 50), wrong, dtype=torch.float64)]))
        assert bool((result >= honest.min(dim=0).values).all() and (result <= honest.max(dim=0).values).all())
