"""FedAvgM against Hsu et al. 2019, section 4.3."""

import pytest
from reference import UNEVEN, assert_same, copied, descend, entries, mean
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.methods import build_methods
from medfedaug.methods.base import ServerContext
from medfedaug.research.methods.fedavgm import FedAvgM


@pytest.mark.parametrize(("momentum", "rate", "weighting"), [(0.9, 1.0, "samples"), (0.5, 0.3, "uniform")])
def test_the_server_moves_along_a_velocity(federate, momentum, rate, weighting):
    run = federate(
        "fedavgm",
        plan=UNEVEN,
        settings={"fedavgm": {"momentum": momentum, "server_lr": rate}},
        weighting=weighting,
    )
    network, velocity = run.network(), {}
    for round_, participants in enumerate(UNEVEN, start=1):
        local = [entries(descend(copied(network), run.batches[site, round_], 0.05)) for site in participants]
        weights = [run.server.sites[site] if weighting == "samples" else 1 for site in participants]
        model = mean(local, weights)
        for key, parameter in network.named_parameters():
            velocity[key] = momentum * velocity.get(key, 0.0) + (parameter.detach() - model[key])
            model[key] = parameter.detach() - rate * velocity[key]
        network = copied(network, model)
        assert_same(run.models[round_], model)


def test_only_one_method_makes_the_global_model():
    with pytest.raises(ConfigError, match=r"momentum must be below 1, got 1\.5"):
        build_methods([{"name": "fedavgm", "args": {"momentum": 1.5}}])
    network = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"fedavgm acts on the parameters .* all stay at their sites"):
        FedAvgM().aggregator(ServerContext(network, 1, local_entries=frozenset(network.state_dict())))
