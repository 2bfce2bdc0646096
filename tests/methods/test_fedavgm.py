"""FedAvgM against Hsu et al. 2019, section 4.3."""

from __future__ import annotations

import pytest
from reference import UNEVEN, assert_same, copied, descend, entries, mean


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize(("momentum", "rate"), [(0.9, 1.0), (0.5, 0.3), (0.0, 1.0)])
def test_the_server_moves_along_a_velocity(federate, momentum, rate, weighting):
    run = federate(
        "fedavgm",
        plan=UNEVEN,
        settings={"fedavgm": {"momentum": momentum, "server_lr": rate}},
        network="reference_convolutional",
        weighting=weighting,
    )
    network, velocity = run.network(), {}
    for round_, asked in enumerate(UNEVEN, start=1):
        local = [entries(descend(copied(network), run.batches[site, round_], 0.05)) for site in asked]
        weights = [run.server.sites[site] if weighting == "samples" else 1 for site in asked]
        model = mean(local, weights)
        for key, parameter in network.named_parameters():
            velocity[key] = momentum * velocity.get(key, 0.0) + (parameter.detach() - model[key])
            model[key] = parameter.detach() - rate * velocity[key]
        network = copied(network, model)
        assert_same(run.models[round_], model)
