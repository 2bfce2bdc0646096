"""MOEX against Li et al., CVPR 2021, Eq. 1 to 3."""

import pytest
import torch
from reference import UNEVEN, assert_steps
from small_networks import build_small
from torch.nn.functional import cross_entropy

from medfedaug.models import stage_layers
from medfedaug.research.methods.moex import MoEx, MomentExchangeLayer


def test_features_take_on_the_moments_of_another_image(federate):
    run = federate("moex", plan=UNEVEN, settings={"moex": {"weight": 0.8}}, local_epochs=2)
    active = []

    def step(network, x, y, draws):
        z = network.encoder[0](x)
        active.append(float(draws[0]) < 0.5)
        if active[-1]:
            order = draws[1]
            mean = z.mean(1, keepdim=True)
            std = ((z - mean).square().mean(1, keepdim=True) + 1e-5).sqrt()
            z = (z - mean) / std * std[order] + mean[order]
        out = network.head(network.encoder[1](z))
        if not active[-1]:
            return cross_entropy(out, y)
        return 0.8 * cross_entropy(out, y) + 0.2 * cross_entropy(out, y[draws[1]])

    assert_steps(run, step)
    assert {True, False} == set(active)


def test_moment_exchange_of_volumes_is_its_equation():
    x = torch.randn(4, 3, 5, 5, 5, dtype=torch.float64)
    layer = MomentExchangeLayer(3)
    layer.partners = torch.tensor([2, 0, 3, 1])
    for result, own, other in zip(layer(x), x, x[layer.partners], strict=True):

        def moment(v):
            mean = v.mean(0, keepdim=True)
            return mean, (((v - mean) ** 2).mean(0, keepdim=True) + 1e-5).sqrt()

        (mean, std), (mean2, std2) = moment(own), moment(other)
        torch.testing.assert_close(result, std2 * (own - mean) / std + mean2)


@pytest.mark.parametrize("name", ["dynunet", "resnet18", "unet"])
def test_moments_are_exchanged_within_a_network(name):
    network = MoEx().prepare_network(build_small(name, size=64, in_channels=1, out_channels=2)).train()
    (layer,) = stage_layers(network, MomentExchangeLayer).values()
    seen = {}
    layer.register_forward_hook(lambda m, args, out: seen.update(x=args[0], y=out))
    layer.partners = torch.tensor([1, 0])
    network(torch.rand(2, 1, 64, 64))
    assert not torch.equal(seen["x"], seen["y"])
    torch.testing.assert_close(seen["y"].mean(1), seen["x"][[1, 0]].mean(1), rtol=1e-3, atol=1e-3)
