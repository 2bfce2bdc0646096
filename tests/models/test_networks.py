"""Networks by name, and the stages of MONAI's networks."""

import copy

import pytest
import torch
from monai.networks.nets import DenseNet, DynUNet, SegResNet, SegResNetDS, SwinUNETR, resnet10
from small_networks import SEGMENTING, needs_einops
from torch import nn

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition
from medfedaug.models import build_network, ffa_layers, insert_ffa, network_names, remove_ffa
from medfedaug.models.entries import call_with
from medfedaug.models.supervision import network_heads
from medfedaug.research.papers.presets import PRESETS

# Smallest sensible image, number of parameters (three channels in, ten classes out) where a source gives it,
# widths.
CLASSIFIERS = {
    # FedFA, ICLR 2023: 49.5 MB, and Table 10.
    "alexnet": (64, 12_974_154, [64, 192, 384, 256, 256]),
    "lenet5": (32, None, [6, 16]),
    # The originals' 11.69 and 25.56 million for 1000 classes, less 990 of them.
    "resnet18": (64, 11_689_512 - 990 * 513, [64, 64, 128, 256, 512]),
    "resnet50": (64, 25_557_032 - 990 * 2049, [64, 256, 512, 1024, 2048]),
    "densenet100": (32, None, [24, 108, 150, 342]),
    "swin_t": (32, 28_288_354 - 990 * 769, [192, 384, 768, 768]),
}
LARGE = ("alexnet", "resnet50", "swin_t")


def parameters(net):
    return sum(p.numel() for p in net.parameters())


def image(net_size, in_channels=3, spatial_dims=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, in_channels, *[net_size] * spatial_dims, generator=generator)


def check_ffa(net, x, widths):
    """Evaluation bit for bit, state dict, number and width of stages, a training step."""
    keys, modules = list(net.state_dict()), [name for name, _ in net.named_modules()]
    net.eval()
    with torch.no_grad():
        (expected,) = network_heads(net, net(x))
        insert_ffa(net, prob=1.0)
        assert torch.equal(network_heads(net, net(x))[0], expected)
    assert list(net.state_dict()) == keys
    assert list(ffa_layers(net)) == [f"enc{i + 1}" for i in range(len(widths))]
    assert [layer.num_channels for layer in ffa_layers(net).values()] == widths
    net.train()
    out = net(x)
    out = out if isinstance(out, torch.Tensor) else out[-1]
    out.square().mean().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
    assert all(layer.num_active_batches == 1 for layer in ffa_layers(net).values())
    remove_ffa(net)
    assert [name for name, _ in net.named_modules()] == modules
    return expected


def test_names():
    # The vision transformer, which has no stages, is tested with its prompts.
    assert set(network_names()) == {*CLASSIFIERS, *SEGMENTING, "vit"}
    with pytest.raises(ValueError, match="'vgg' is not known; choose from alexnet, basicunet, "):
        build_network("vgg")
    with pytest.raises(ConfigError, match="norm 'batchnorm' is not known; did you mean batch"):
        build_network("unet", norm="batchnorm")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[needs_einops, pytest.mark.slow] if n in LARGE else ()) for n in CLASSIFIERS],
)
def test_classifiers(name):
    size, count, widths = CLASSIFIERS[name]
    net = build_network(name, in_channels=3, out_channels=10)
    if count is not None:
        assert parameters(net) == count
    assert check_ffa(net, image(size), widths).shape == (2, 10)


def test_presets_with_the_papers_unet_have_its_activation():
    for name in ("prostate_mri", "prostate_mri_slices", "fedrdn_prostate_mri"):
        config = RunConfig.from_dict(dict(PRESETS[name].config))
        kinds = {type(module) for module in Composition(config).network.modules()}
        assert nn.ReLU in kinds
        assert nn.LeakyReLU not in kinds


def test_the_papers_networks_have_the_papers_sizes():
    unet = build_network("basicunet", in_channels=1, out_channels=2, features=(32, 64, 128, 256, 512, 32))
    # The papers' has its last transposed convolution half as wide, and no biases before batch norm.
    biases = 4 * (32 + 64 + 128 + 256) + 2 * 512
    theirs = parameters(unet) - (32 * 64 * 4 + 32) - 32 * 32 * 9 - biases
    assert round(theirs * 4 / 2**20, 1) == 29.6
    assert round(parameters(unet) * 4 / 2**20, 1) == 29.7
    alexnet = build_network("alexnet", in_channels=3, out_channels=10)
    assert round(parameters(alexnet) * 4 / 2**20, 1) == 49.5
    # Costs a round and a site: four vectors of float32 a stage (FedFA+ section 6.1).
    for net, kilobytes in ((unet, 15.5), (alexnet, 18.0)):
        layers = ffa_layers(insert_ffa(net)).values()
        vectors = [t for layer in layers for t in (*layer.statistics(), layer.gamma_mean, layer.gamma_std)]
        assert sum(t.numel() * t.element_size() for t in vectors) / 1024 == kilobytes


@pytest.mark.parametrize(
    ("name", "norm"),
    [*(("lenet5", norm) for norm in ("batch", "instance", "layer", "group")), ("resnet18", "group")],
)
def test_norms(name, norm):
    size, args = CLASSIFIERS[name][0], {"in_channels": 3, "out_channels": 4}
    net = build_network(name, norm=norm, **args)
    kinds = {
        "batch": nn.modules.batchnorm._BatchNorm,
        "instance": (nn.modules.instancenorm._InstanceNorm, nn.GroupNorm),
        "layer": nn.GroupNorm,
        "group": nn.GroupNorm,
    }
    every = (
        nn.modules.batchnorm._BatchNorm,
        nn.modules.instancenorm._InstanceNorm,
        nn.GroupNorm,
        nn.LayerNorm,
    )
    norms = [m for m in net.modules() if isinstance(m, every)]
    plain = build_network(name, **args)
    assert len(norms) == sum(isinstance(m, every) for m in plain.modules())
    assert all(isinstance(m, kinds[norm]) for m in norms)
    assert parameters(net) == parameters(plain)
    if norm in ("layer", "group"):
        groups = {m.num_groups for m in norms}
        assert groups == {1} if norm == "layer" else 8 in groups
    x = image(size)
    out = net(x)
    assert out.shape == plain(x).shape
    assert torch.isfinite(out).all()
    if norm != "batch":
        # Nothing else than batch norm mixes the images of a batch.
        torch.testing.assert_close(net(x[:1]), out[:1], rtol=1e-3, atol=1e-4)
    insert_ffa(net, prob=1.0)
    net(x)
    assert all(layer.num_active_batches == 1 for layer in ffa_layers(net).values())


def dyn_unet(**args):
    return DynUNet(
        2, 1, 2, [3] * 4, [1, 2, 2, 2], [2, 2, 2], filters=[4, 6, 8, 10], norm_name="batch", **args
    )


MONAI = {
    "dynunet, deep supervision": (lambda: dyn_unet(deep_supervision=True, res_block=True), [4, 6, 8, 10]),
    "segresnet": (lambda: SegResNet(2, init_filters=8, blocks_down=(1, 2, 1), blocks_up=(1, 1)), [8, 16, 32]),
    "segresnet_ds": (
        lambda: SegResNetDS(2, init_filters=8, in_channels=1, blocks_down=(1, 1, 2)),
        [8, 16, 32],
    ),
    "densenet": (
        lambda: DenseNet(2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2, 2)),
        [8, 8, 8, 16],
    ),
    "resnet without pooling": (
        lambda: resnet10(
            spatial_dims=2, n_input_channels=1, num_classes=3, no_max_pool=True, conv1_t_stride=2
        ),
        [64, 64, 128, 256, 512],
    ),
    "swin unetr v2": (
        lambda: SwinUNETR(
            in_channels=1, out_channels=2, feature_size=12, spatial_dims=2, depths=(1, 1, 1, 1), use_v2=True
        ),
        [12, 24, 48, 96, 192],
    ),
}


def cases(names):
    return [pytest.param(*MONAI[n], id=n, marks=needs_einops if n.startswith("swin") else ()) for n in names]


NOT_BUILT_IN = ("densenet", "resnet without pooling")


@pytest.mark.parametrize(("make", "widths"), cases(NOT_BUILT_IN))
def test_networks_of_monai(make, widths):
    check_ffa(make(), image(64, in_channels=1), widths)


def record_skips(net):
    """Skip connections, shallow to deep, as the decoder receives them."""
    skips = []

    def keep(position):
        return lambda module, args: skips.insert(0, args[position])

    if isinstance(net, DynUNet):
        level = net.skip_layers
        while hasattr(level, "upsample") and hasattr(level, "next_layer"):
            level.upsample.register_forward_pre_hook(keep(1))
            level = level.next_layer
    elif isinstance(net, SegResNet):
        decode = net.decode
        net.decode = lambda x, down_x: (skips.extend(down_x[:0:-1]), decode(x, down_x))[1]
    else:
        encoder = net.swinViT if isinstance(net, SwinUNETR) else net.encoder
        encoder.register_forward_hook(lambda module, args, out: skips.extend(out[:-1]))
    return skips


@pytest.mark.parametrize(
    ("make", "widths"), cases([n for n in MONAI if not n.startswith(("densenet", "resnet"))])
)
def test_skip_connections_are_clean(make, widths):
    plain, x = make(), image(64, in_channels=1)
    # Fresh copies for every pass: a pass in training changes the batch norms' running statistics.
    net = copy.deepcopy(plain)
    reference = record_skips(net)
    with torch.no_grad():
        expected = net(x)
    depth = len(widths)
    assert len(reference) == depth - 1
    for stage in range(1, depth + 1):
        net = insert_ffa(copy.deepcopy(plain), stages=[stage], prob=1.0, variance="random")
        skips = record_skips(net)
        with torch.no_grad():
            out = net(x)
        first = expected[0] if isinstance(expected, list) else expected
        assert not torch.equal(out[0] if isinstance(out, list) else out, first)
        same = [torch.equal(a, b) for a, b in zip(skips, reference, strict=True)]
        # The stage's own skip and those above it are untouched; everything below follows the augmentation.
        assert same == [level <= stage for level in range(1, depth)]


def test_a_call_with_other_weights_leaves_the_networks_own():
    """One module has two names, as in MONAI's DynUNet."""
    torch.manual_seed(0)
    inner = nn.Linear(3, 3)
    net = nn.Sequential(inner, nn.BatchNorm1d(3), inner)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    own = list(net.parameters())
    other = {key: torch.rand_like(value) for key, value in before.items() if value.is_floating_point()}
    other |= {key.replace("0.", "2."): value for key, value in other.items() if key.startswith("0.")}
    x, plain = torch.rand(4, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    plain.load_state_dict(other, strict=False)
    for arguments in (other, {key: value for key, value in other.items() if not key.startswith("2.")}):
        torch.testing.assert_close(call_with(net.eval(), arguments, x), plain.eval()(x))
        assert all(a is b for a, b in zip(net.parameters(), own, strict=True))
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
