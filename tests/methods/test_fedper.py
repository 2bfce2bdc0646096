"""FedPer against Arivazhagan et al., 2019, Algorithms 1 and 2."""

from __future__ import annotations

import pytest
from reference import UNEVEN, assert_models, assert_tested_with_its_own, descend, federated_averaging
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition
from medfedaug.methods import FedPer


def test_a_site_goes_on_with_its_own_last_layer(federate, tmp_path):
    run = federate(
        "fedper",
        plan=UNEVEN,
        network="reference_convolutional",
        states=tmp_path / "states",
        local_epochs=2,
    )

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train, lambda key: key.startswith("head.2."))
    assert set(run.server.state) - set(run.models[0]) >= {"head.2.weight", "head.2.bias"}
    assert_models(run, rounds)
    assert_tested_with_its_own(run, rounds, "B")


def test_a_site_that_did_not_train_has_no_last_layer_and_no_score(federate):
    run = federate(
        "fedper", sizes={"A": 5, "B": 5, "D": 5}, holdout=("D",), network="reference_convolutional", rounds=1
    )
    assert run.tested["A"].metrics["accuracy"] is not None
    assert run.tested["D"].metrics["accuracy"] is None
    assert "this site has none" in run.tested["D"].metrics["note"]


def test_the_last_layer_of_a_unet_is_its_last_convolution(tiny_config):
    composition = Composition(tiny_config("fedper", network="basicunet", network_args={"features": [4] * 6}))
    assert composition.kept_keys == {"final_conv.weight", "final_conv.bias"}


@pytest.mark.parametrize("residual_units", [0, 2])
def test_the_last_layer_of_monais_unet_is_its_last_block(tiny_config, residual_units):
    args = {"channels": [4, 8, 8], "strides": [2, 2], "num_res_units": residual_units}
    composition = Composition(tiny_config("fedper", network="unet", network_args=args))
    block = {f"model.2.{key}" for key in composition.network.get_submodule("model.2").state_dict()}
    assert composition.kept_keys == block


def test_fedper_needs_layers_below_the_last():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    assert FedPer().local_entries(network) == {"3.weight", "3.bias"}
    assert FedPer(head="2").local_entries(network) == {"2.weight", "2.bias"}
    with pytest.raises(ConfigError, match="fedper: all of Linear would stay at the site"):
        FedPer().local_entries(nn.Linear(3, 2))
