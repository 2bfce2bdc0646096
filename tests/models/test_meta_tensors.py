"""Networks with layers of the methods train on the MetaTensors of MONAI's loaders as on plain tensors."""

from __future__ import annotations

import pytest
import torch
from monai.data import MetaTensor
from monai.networks.nets import DenseNet121, EfficientNetBN
from small_networks import build_small
from torch import nn

from medfedaug.models import (
    FeatureMixLayer,
    MixStyleLayer,
    MomentExchangeLayer,
    insert_ffa,
    insert_instance_adapters,
    insert_layers,
    training_adapters,
)
from medfedaug.models.adaptation import RandomMix, adapt_batch_norm, interpolating
from medfedaug.models.networks import task_of
from medfedaug.research.layers.phase_norms import control_shortcuts

pytestmark = pytest.mark.filterwarnings("ignore:FFA layer")  # of small features


def gradients(make, x, wrap, autocast=False):
    """Losses and gradients of a network on a batch, from one seed."""
    torch.manual_seed(0)
    net = make()
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = net(wrap(x))
    outs = list(out) if isinstance(out, list | tuple) else [out]
    loss = sum((o.float() ** 2).mean() for o in outs)
    loss.backward()
    return loss.detach(), [p.grad for p in net.parameters() if p.grad is not None]


def assert_alike(make, x, autocast=False):
    # In bfloat16, PyTorch's own convolutions take more than ten times as long as oneDNN's.
    with torch.backends.mkldnn.flags(enabled=autocast):
        (loss, grads), (expected, plain) = (
            gradients(make, x, wrap, autocast) for wrap in (MetaTensor, torch.Tensor.clone)
        )
    assert torch.isfinite(expected)
    torch.testing.assert_close(loss.as_subclass(torch.Tensor), expected)
    assert len(grads) == len(plain) > 0
    # Sums over other strides differ in the last digits.
    close = {"rtol": 2e-2, "atol": 1e-3} if autocast else {"rtol": 1e-4, "atol": 1e-6}
    for one, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other, **close)


def image(channels, dims, size):
    return torch.rand(2, channels, *[size] * dims, generator=torch.Generator().manual_seed(3))


def augmented(name, dims=2):
    size = 64 if name.startswith(("swin", "flexible", "alexnet")) else 32
    channels = 1 if task_of(name) == "segmentation" else 3
    args = {"in_channels": channels, "out_channels": 3, **({"spatial_dims": dims} if dims == 3 else {})}
    return lambda: insert_ffa(build_small(name, size, **args), prob=1.0).train(), image(channels, dims, size)


@pytest.mark.parametrize("name", ["dynunet", "lenet5", "segresnet", "unet"])
def test_networks_with_ffa(name):
    assert_alike(*augmented(name))


def test_half_precision_with_ffa():
    assert_alike(*augmented("unet"), autocast=True)


def test_volumes_with_ffa():
    assert_alike(*augmented("unet", dims=3))


@pytest.mark.parametrize(
    "make",
    [lambda: _plain("densenet"), lambda: EfficientNetBN("efficientnet-b0", False, True, 2, 1, 2)],
    ids=["densenet", "efficientnet"],
)
def test_monai_networks_that_change_features_in_place(make):
    net = make()
    stages = None if isinstance(net, DenseNet121) else ["_conv_stem"]
    assert_alike(lambda: insert_ffa(make(), stages, prob=1.0).train(), image(1, 2, 64))


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
def test_norms_that_interpolate(name):
    class Mixed(nn.Module):
        """FedFD's second pass."""

        def __init__(self):
            super().__init__()
            self.net = adapt_batch_norm(_plain(name)).train()

        def forward(self, x):
            with interpolating(self.net, RandomMix()):
                return self.net(x)

    assert_alike(Mixed, image(1, 2, 64))


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
