"""MONAI's networks for segmentation, 2D and 3D: by name, by class path, with layers, with other norms."""

import pytest
import torch
from monai.networks.nets import HighResNet, SegResNet
from small_networks import SEGMENTING, WIDTHS, build_small, marked
from torch import nn

from medfedaug.config.plan import Plan
from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition
from medfedaug.models import build_network, ffa_layers, find_head, insert_ffa, remove_ffa
from medfedaug.models.networks import size_multiple
from medfedaug.models.supervision import network_heads

BATCH_NORM = nn.modules.batchnorm._BatchNorm
OTHER_NORMS = {
    "instance": {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d},
    "layer": {2: nn.GroupNorm, 3: nn.GroupNorm},
    "group": {2: nn.GroupNorm, 3: nn.GroupNorm},
}


# Of 16 voxels one is left at the bottom, which batch norm can normalise and instance norm cannot.
SIZES = dict.fromkeys(("dynunet", "swinunetr", "unetr"), 32)
LARGE = ("swinunetr",)  # whatever its arguments


def image(name, spatial_dims):
    size = [SIZES.get(name, 16)] * spatial_dims
    return torch.rand(2, 1, *size, generator=torch.Generator().manual_seed(0))


def in_both(names):
    """Names with the numbers of dimensions; large networks in 3D train on volumes in a slow test."""
    return [
        pytest.param(*name.values, dims, marks=name.marks)
        for name in marked(names)
        for dims in ((2,) if name.values[0] in LARGE else (2, 3))
    ]


@pytest.mark.parametrize(("name", "spatial_dims"), in_both(SEGMENTING))
def test_the_head_gives_what_the_network_gives(name, spatial_dims):
    for args in ({}, {"num_res_units": 0}) if name == "unet" else ({},):
        net, arguments = (
            build_small(name, spatial_dims=spatial_dims, in_channels=1, out_channels=3, **args),
            [],
        )
        find_head(net.eval()).register_forward_hook(
            lambda module, inputs, output, to=arguments: to.append(output)
        )
        with torch.no_grad():
            (outputs,) = network_heads(net, net(image(name, spatial_dims)))
        assert torch.equal(arguments[-1], outputs)


@pytest.mark.parametrize(("name", "spatial_dims"), in_both(SEGMENTING))
def test_layers_leave_the_network_alone_but_in_training(name, spatial_dims):
    net = build_small(name, spatial_dims=spatial_dims, in_channels=1, out_channels=3).eval()
    x, keys = image(name, spatial_dims), list(net.state_dict())
    modules = [module for module, _ in net.named_modules()]
    with torch.no_grad():
        (plain,) = network_heads(net, net(x))
        insert_ffa(net, prob=1.0)
        (with_layers,) = network_heads(net, net(x))
    assert plain.shape == (2, 3, *x.shape[2:])
    assert torch.equal(with_layers, plain)
    assert list(net.state_dict()) == keys
    layers = ffa_layers(net)
    assert [layer.num_channels for layer in layers.values()] == WIDTHS[name]
    changed = {}
    for stage, layer in layers.items():
        layer.register_forward_hook(lambda m, args, out, s=stage: changed.update({s: (args[0], out)}))
    network_heads(net.train(), net(x))[0].square().mean().backward()
    for stage, (before, after) in changed.items():
        assert before.shape == after.shape
        assert not torch.equal(before, after), stage
    assert list(changed) == list(layers)
    remove_ffa(net)
    assert [module for module, _ in net.named_modules()] == modules


@pytest.mark.parametrize(
    ("name", "spatial_dims"),
    [("unet", 3), *((name, 2) for name in SEGMENTING if name not in ("mednext", "swinunetr"))],
)
def test_every_norm(name, spatial_dims):
    def build(norm):
        args = {"spatial_dims": spatial_dims, "in_channels": 1, "out_channels": 2, "norm": norm}
        return build_small(name, **args)

    batch = build("batch")
    norms = [path for path, m in batch.named_modules() if isinstance(m, BATCH_NORM)]
    assert len(norms) > 5
    for norm, kind in OTHER_NORMS.items():
        net = build(norm)
        assert not any(isinstance(m, BATCH_NORM) for m in net.modules())
        assert {type(net.get_submodule(path)) for path in norms} == {kind[spatial_dims]}
        assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in batch.parameters())
    with torch.no_grad():
        (out,) = network_heads(net.eval(), net(image(name, spatial_dims)))
    assert torch.isfinite(out).all()


def test_a_norm_can_be_the_networks_own():
    norm = ["group", {"num_groups": 2}]
    net = build_small("dynunet", norm=norm)
    assert {m.num_groups for m in net.modules() if isinstance(m, nn.GroupNorm)} == {2}
    with pytest.raises(ValueError, match="'mednext' has no batch norm that could be replaced"):
        build_small("mednext", norm="instance")


def test_a_class_path_gives_monais_own_network():
    torch.manual_seed(0)
    ours = build_network("monai.networks.nets.SegResNet", spatial_dims=3, in_channels=2, out_channels=3)
    torch.manual_seed(0)
    theirs = SegResNet(3, in_channels=2, out_channels=3)
    assert type(ours) is SegResNet
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert type(build_network("monai.networks.nets.HighResNet", norm="group")) is HighResNet
    # Other names of the same arguments, and arguments that a class passes on to its base class.
    net = build_network("monai.networks.nets.SEResNet50", in_channels=3, out_channels=5)
    assert net.last_linear.out_features == 5
    # On ImageNet by default: nothing is downloaded.
    path, args = "monai.networks.nets.EfficientNetBN", {"model_name": "efficientnet-b0"}
    assert build_network(path, in_channels=3, out_channels=5, **args)._fc.out_features == 5


@pytest.mark.parametrize(
    ("network", "args", "words"),
    [
        ("os.system", {}, "monai.networks.nets has no network of the name"),
        ("monai.networks.nets.segresnet.SegResNet", {}, "monai.networks.nets has no network of the name"),
        ("monai.transforms.Compose", {}, "monai.networks.nets has no network of the name"),
        ("monai.networks.nets.SegResNot", {}, "has no network of the name SegResNot"),
        ("monai.networks.nets.resnet18", {}, "has no network of the name resnet18"),
        ("monai.networks.nets.__builtins__", {}, "has no network of the name __builtins__"),
        ("monai.networks.nets.swin_unetr", {}, "has no network of the name swin_unetr"),
        ("monai.networks.nets.Transchex", {}, "Transchex has no argument spatial_dims"),
        ("monai.networks.nets.TorchVisionFCModel", {}, "TorchVisionFCModel has no argument spatial_dims"),
        ("monai.networks.nets.ResNetFeatures", {}, "ResNetFeatures has no argument out_channels"),
        ("monai.networks.nets.UNet", {"strides": [2]}, "missing 1 required .* 'channels'"),
        ("monai.networks.nets.UNet", {"chanels": [8]}, "unexpected keyword argument 'chanels'"),
        ("unetr", {}, "UNETR needs images of one size: --image-size"),
        ("monai.networks.nets.FlexibleUNet", {"pretrained": True}, "pretrained: weights are neither read"),
        ("monai.networks.nets.HoVerNet", {"adapt_standard_resnet_path": "x"}, "are neither read from a file"),
        ("segresnet", {"in_channels": 2}, "in_channels follows from"),
        ("monai.networks.nets.DenseNet121", {"spatial_dims": 3}, "spatial_dims follows from"),
    ],
)
def test_a_network_that_cannot_be_built_is_named_in_one_line(tiny_config, network, args, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Composition(tiny_config(network=network, network_args=args))
    assert "\n" not in str(caught.value)


def test_sizes_that_a_network_takes(tiny_config):
    sizes = {
        name: size_multiple(build_small(name, spatial_dims=3), 3)
        for name in sorted(set(SEGMENTING) - {"swinunetr"})
    }
    four, sixteen = (4, 4, 4), (16, 16, 16)
    assert sizes == {
        **dict.fromkeys(("mednext", "segresnet", "segresnetds", "unet"), four),
        **dict.fromkeys(("basicunet", "dynunet", "unetr"), sixteen),
    }
    anisotropic = build_network("dynunet", spatial_dims=3, strides=(1, (2, 2, 1), 2, 2, 2))
    assert size_multiple(anisotropic, 3) == (16, 16, 8)
    # Images are padded to what the network needs, and at least as they always were.
    flexible = {"network": "monai.networks.nets.FlexibleUNet", "network_args": {"backbone": "resnet10"}}
    small = {"network": "unet", "network_args": SEGMENTING["unet"]}
    for changes, divisor in ((small, 16), (flexible, 32)):
        config = tiny_config(**changes)
        assert Composition(config).task().divisor == divisor


def test_patches_that_a_network_cannot_take_are_refused(tiny_config):
    plan = Plan(spatial_dims=3, patch_size=(20, 16, 18))
    words = "network segresnet: images must have .*of 4 x 4 x 4, not 20 x 16 x 18"
    with pytest.raises(ConfigError, match=words):
        Composition(tiny_config(network="segresnet", network_args=SEGMENTING["segresnet"], plan=plan))


def test_unetr_is_made_for_the_patches_of_the_plan(tiny_config):
    args = SEGMENTING["unetr"]
    plan = Plan(spatial_dims=3, patch_size=(32, 32, 16))
    network = Composition(tiny_config(network="unetr", network_args=args, plan=plan)).network
    assert network(torch.rand(1, 1, 32, 32, 16)).shape == (1, 2, 32, 32, 16)
    config = tiny_config(network="unetr", network_args={**args, "img_size": 32}, plan=plan)
    with pytest.raises(ConfigError, match="images must have the size 32 x 32 x 32, not 32 x 32 x 16"):
        Composition(config)
