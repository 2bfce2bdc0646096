"""Networks with layers of the methods train on the MetaTensors of MONAI's loaders as on plain tensors."""

import pytest
import torch
from monai.data import MetaTensor
from monai.networks.nets import DenseNet121
from small_networks import build_small

from medfedaug.models import insert_ffa, insert_instance_adapters, insert_layers, training_adapters
from medfedaug.research.methods.dac_sc import control_shortcuts
from medfedaug.research.methods.manifold_mixup import FeatureMixLayer
from medfedaug.research.methods.mixstyle import MixStyleLayer
from medfedaug.research.methods.moex import MomentExchangeLayer

pytestmark = pytest.mark.filterwarnings("ignore:FFA layer")  # of small features


def gradients(make, x, wrap):
    """Losses and gradients of a network on a batch, from one seed."""
    torch.manual_seed(0)
    net = make()
    torch.manual_seed(1)
    out = net(wrap(x))
    outs = list(out) if isinstance(out, list | tuple) else [out]
    loss = sum((o**2).mean() for o in outs)
    loss.backward()
    return loss.detach(), [p.grad for p in net.parameters() if p.grad is not None]


def assert_alike(make, x):
    with torch.backends.mkldnn.flags(enabled=False):
        (loss, grads), (expected, plain) = (gradients(make, x, wrap) for wrap in (MetaTensor, torch.clone))
    assert torch.isfinite(expected)
    torch.testing.assert_close(loss.as_subclass(torch.Tensor), expected)
    assert len(grads) == len(plain) > 0
    # Sums over other strides differ in the last digits.
    for one, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other, rtol=1e-4, atol=1e-6)


def image(channels, dims, size):
    return torch.rand(2, channels, *[size] * dims, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("name", "dims"), [("dynunet", 2), ("unet", 3)])
def test_networks_with_ffa(name, dims):
    def make():
        return insert_ffa(
            build_small(name, spatial_dims=dims, in_channels=1, out_channels=3), prob=1.0
        ).train()

    assert_alike(make, image(1, dims, 32))


def test_a_network_that_changes_features_in_place():
    assert_alike(lambda: insert_ffa(_plain("densenet"), prob=1.0).train(), image(1, 2, 64))


LAYERS = {
    "mixstyle": lambda net: insert_layers(net, MixStyleLayer, prob=1.0),
    "moex": lambda net: insert_layers(net, MomentExchangeLayer),
    "manifold mixup": lambda net: insert_layers(net, FeatureMixLayer),
    "dac_sc": control_shortcuts,
    "ffa and mixstyle": lambda net: insert_layers(insert_ffa(net, prob=1.0), MixStyleLayer, prob=1.0),
}


@pytest.mark.parametrize("change", LAYERS.values(), ids=LAYERS.keys())
def test_layers_of_the_other_methods(change):
    assert_alike(lambda: change(_plain("unet")).train(), image(1, 2, 64))


@pytest.mark.parametrize("name", ["unet", "densenet"])
def test_adapters_train_and_decide_in_evaluation(name):
    x = image(1, 2, 64)
    values = []
    for wrap in (MetaTensor, torch.Tensor.clone):
        torch.manual_seed(0)
        net = insert_instance_adapters(_plain(name))
        torch.manual_seed(1)
        with training_adapters(net) as parameters:
            grads = torch.autograd.grad((net(wrap(x)) ** 2).mean(), parameters)
        values.append([*grads, net.eval()(wrap(x))])
    for one, other in zip(*values, strict=True):
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other)


def _plain(name):
    if name == "densenet":
        return DenseNet121(2, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2, 2, 2))
    return build_small(name, in_channels=1, out_channels=2)
