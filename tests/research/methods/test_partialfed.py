"""PartialFed-Fix: layers that are not loaded go on where they stopped."""

import pytest
import torch
from reference import UNEVEN, assert_models, assert_tested_with_its_own, descend, federated_averaging, same
from small_networks import build_small, needs_einops
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition
from medfedaug.models import build_network
from medfedaug.models.sizes import some_size
from medfedaug.models.stages import known_stages
from medfedaug.research.methods.partialfed import PartialFed

KEPT = {
    "norm": ("encoder.0.1.", "encoder.1.1."),
    "head": ("head.2.",),
    "norm+head": ("encoder.0.1.", "encoder.1.1.", "head.2."),
    "bottom_up": ("encoder.1.", "head."),
    "top_down": ("encoder.0.",),
}


@pytest.mark.parametrize("strategy", KEPT)
def test_a_site_loads_some_layers_and_goes_on_with_the_others(federate, strategy):
    run = federate("partialfed", plan=UNEVEN, settings={"partialfed": {"strategy": strategy}}, local_epochs=2)

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train, lambda key: key.startswith(KEPT[strategy]))
    assert_models(run, rounds)
    assert_tested_with_its_own(run, rounds, "B")


# Layers that are registered before the end of the first stage, and come after it, or the other way round.
SWIN = "monai.networks.nets.SwinUNETR"
NOT_IN_ORDER = {
    "attentionunet": ({}, ("model.0.",), ("model.1.attention.", "model.2.")),
    "dynunet": ({}, ("input_block.",), ("bottleneck.", "upsamples.", "output_block.")),
    "mednext": ({}, ("stem.", "enc_stages.0."), ("enc_stages.1.", "bottleneck.")),
    "unetr": ({}, ("vit.",), ("encoder1.", "decoder5.", "out.")),
    SWIN: (
        {"feature_size": 12, "depths": (1, 1, 1, 1), "use_v2": True},
        ("swinViT.patch_embed.",),
        ("swinViT.layers1", "swinViT.layers2", "encoder1.", "out."),
    ),
}


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        *((name, 2) for name in NOT_IN_ORDER if name != SWIN),
        ("dynunet", 3),
        pytest.param(SWIN, 2, marks=needs_einops),
    ],
)
def test_partialfed_follows_the_features_and_not_the_order_of_registration(name, dims):
    args, first, others = NOT_IN_ORDER[name]
    network = build_small(name, spatial_dims=dims, in_channels=1, out_channels=2, **args)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    drawn = torch.get_rng_state()
    result = PartialFed("top_down").local_entries(network)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert network.training
    assert same(network.state_dict(), before)
    for part in first:
        assert any(key.startswith(part) for key in result), part
    assert not [key for key in result if key.startswith(others)]
    # The entries are those that the first stage's features have a gradient from.
    features, (stage, *_) = [], known_stages(network)
    place = network.get_submodule(stage.module)
    if stage.side == "input":
        place.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    else:
        place.register_forward_hook(lambda _, args, output: features.append(output))
    network.eval()(torch.rand(1, 1, *some_size(network, dims)))
    parameters = dict(network.named_parameters())
    gradients = torch.autograd.grad(
        (features[0] * torch.rand_like(features[0])).sum(), list(parameters.values()), allow_unused=True
    )
    reached = {key for key, g in zip(parameters, gradients, strict=True) if g is not None}
    assert result & parameters.keys() == reached


def test_partialfed_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="no stage 9; known: enc1"):
        PartialFed("bottom_up", stages=9).local_entries(build_network("lenet5"))
    with pytest.raises(ConfigError, match="stages of Linear are not known"):
        PartialFed("top_down").local_entries(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="head leaves all of Linear at the site"):
        PartialFed("head").local_entries(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="no normalisation layer"):
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
