"""PartialFed-Fix: layers that are not loaded go on where they stopped."""

import pytest
from reference import UNEVEN, assert_models, assert_tested_with_its_own, descend, federated_averaging
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition
from medfedaug.research.methods.partialfed import PartialFed

KEPT = {
    "norm": ("encoder.0.1.", "encoder.1.1."),
    "head": ("head.2.",),
    "norm+head": ("encoder.0.1.", "encoder.1.1.", "head.2."),
}


@pytest.mark.parametrize("strategy", KEPT)
def test_a_site_loads_some_layers_and_goes_on_with_the_others(federate, strategy):
    run = federate("partialfed", plan=UNEVEN, settings={"partialfed": {"strategy": strategy}}, local_epochs=2)

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train, lambda key: key.startswith(KEPT[strategy]))
    assert_models(run, rounds)
    assert_tested_with_its_own(run, rounds, "B")


def test_partialfed_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="no norm layer with weights"):
        PartialFed().local_entries(nn.Linear(2, 1))


def test_the_last_layer_of_a_unet_is_its_last_convolution(tiny_config):
    config = tiny_config(
        "partialfed",
        network="basicunet",
        network_args={"features": [4] * 6},
        settings={"partialfed": {"strategy": "head"}},
    )
    assert Composition(config).kept_keys == {"final_conv.weight", "final_conv.bias"}


@pytest.mark.parametrize("residual_units", [0, 2])
def test_the_last_layer_of_monais_unet_is_its_last_block(tiny_config, residual_units):
    args = {"channels": [4, 8, 8], "strides": [2, 2], "num_res_units": residual_units}
    settings = {"partialfed": {"strategy": "head"}}
    composition = Composition(tiny_config("partialfed", network="unet", network_args=args, settings=settings))
    block = {f"model.2.{key}" for key in composition.network.get_submodule("model.2").state_dict()}
    assert composition.kept_keys == block
