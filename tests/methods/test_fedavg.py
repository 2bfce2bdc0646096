"""FedAvg: the federation that every other reference is a change of."""

import pytest
from reference import UNEVEN, assert_models, assert_same, copied, descend, entries, federated_averaging, mean


@pytest.mark.parametrize(
    ("network", "weighting"), [("reference_linear", "uniform"), ("reference_convolutional", "samples")]
)
def test_the_global_model_is_the_mean_of_the_trained_models(federate, network, weighting):
    run = federate("fedavg", plan=UNEVEN, network=network, weighting=weighting, local_epochs=2)
    samples = run.server.sites
    assert samples == {"A": 6, "B": 12, "C": 18}
    model = run.network()
    for round_ in (1, 2, 3):
        local = {}
        for site in run.took_part(round_):
            assert len(run.batches[site, round_]) == 2 * samples[site] // 6
            local[site] = entries(descend(copied(model), run.batches[site, round_], 0.05))
        weights = [samples[site] if weighting == "samples" else 1 for site in local]
        model = copied(model, mean(list(local.values()), weights))
        assert_same(run.models[round_], entries(model))


def test_the_loop_that_the_other_methods_share(federate):
    momentum = 0.9
    run = federate("fedavg", plan=UNEVEN, momentum=momentum, optimizer="sgd")

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05, momentum=momentum)

    assert_models(run, federated_averaging(run, train))


def test_integer_buffers_are_no_part_of_the_mean(federate):
    run = federate("fedavg", rounds=2)
    assert "encoder.0.1.num_batches_tracked" in run.initial
    assert set(run.models[2]) == set(entries(run.network()))
    assert int(run.server.state["encoder.0.1.num_batches_tracked"]) == 0
