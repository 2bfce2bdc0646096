"""PartialFed-Fix: layers that are not loaded go on where they stopped."""

from __future__ import annotations

import pytest
from reference import UNEVEN, assert_models, assert_same, descend, federated_averaging

KEPT = {
    "norm": ("encoder.0.1.", "encoder.1.1."),
    "head": ("head.2.",),
    "norm+head": ("encoder.0.1.", "encoder.1.1.", "head.2."),
    "bottom_up": ("encoder.1.", "head."),
    "top_down": ("encoder.0.",),
}


@pytest.mark.parametrize("strategy", KEPT)
def test_a_site_loads_some_layers_and_goes_on_with_the_others(federate, strategy):
    run = federate(
        "partialfed",
        plan=UNEVEN,
        settings={"partialfed": {"strategy": strategy}},
        network="reference_convolutional",
        local_epochs=2,
    )

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train, lambda key: key.startswith(KEPT[strategy]))
    assert_models(run, rounds)
    selected = run.server.selected_round
    last = max(r for r in range(1, selected + 1) if "B" in run.took_part(r))
    state = run.sites["B"].trainer.network.state_dict()
    found = {key: value for key, value in state.items() if value.is_floating_point()}
    assert_same(found, {**rounds[last - 1].local["B"], **rounds[selected - 1].model})
