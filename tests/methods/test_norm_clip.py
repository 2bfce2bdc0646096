"""Norm clipping against Sun et al. 2019."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import assert_models
from robust import PLAN, SITES, by_hand

from medfedaug.errors import ConfigError
from medfedaug.methods import build_methods


@pytest.mark.parametrize("limit", [0.0, 0.01])
def test_no_update_is_longer_than_the_limit(federate, limit):
    clipped, limits = [], []

    def norm_clip(models, names, weights, network):
        parameters = {key: value.detach() for key, value in network.named_parameters()}
        norms = [
            float(torch.cat([(m[key] - value).flatten() for key, value in parameters.items()]).norm())
            for m in models
        ]
        most = limit or sorted(norms)[(len(norms) - 1) // 2]
        limits.append(most)
        clipped.append([name for name, norm in zip(names, norms, strict=True) if norm > most])
        shares = [weight / sum(weights) for weight in weights]
        new = {}
        for key in models[0]:
            values = np.stack([m[key].numpy() for m in models])
            if key in parameters:
                new[key] = parameters[key] + sum(
                    share * min(1.0, most / norm) * (m[key] - parameters[key])
                    for share, norm, m in zip(shares, norms, models, strict=True)
                )
                continue
            average = np.tensordot(shares, values, 1)
            ordered = np.sort(values, axis=0)
            low, high = ordered[(len(models) - 1) // 2], ordered[len(models) // 2]
            new[key] = torch.from_numpy(np.clip(average, low, high))
        return new

    settings = {"norm_clip": {"limit": limit}}
    run = federate("norm_clip", PLAN, SITES, settings, network="reference_convolutional")
    assert_models(run, by_hand(run, norm_clip))
    reported = [entry["methods"]["norm_clip"] for entry in run.server.rounds]
    assert [one["clipped"] for one in reported] == clipped
    assert [one["limit"] for one in reported] == pytest.approx(limits, rel=1e-5)
    assert clipped[0]


def test_a_limit_is_a_norm():
    with pytest.raises(ConfigError, match="norm_clip: limit cannot be negative"):
        build_methods([{"name": "norm_clip", "args": {"limit": -1.0}}])
