"""FFA layers in networks: their places, unchanged skip connections, and complete removal."""

import copy

import pytest
import torch
from monai.networks.nets import AutoEncoder, BasicUNet, UNet
from torch import nn

from medfedaug.models import FFALayer, ffa_layers, insert_ffa, remove_ffa

WIDTHS = (4, 6, 8, 10, 12)


def basic_unet(spatial_dims=2):
    return BasicUNet(spatial_dims, 1, 2, features=(*WIDTHS, 4), norm="batch")


def unet(spatial_dims=2, num_res_units=2, channels=WIDTHS):
    strides = (2,) * (len(channels) - 1)
    return UNet(
        spatial_dims, 1, 2, channels=channels, strides=strides, num_res_units=num_res_units, norm="batch"
    )


def image(spatial_dims=2, batch=2, size=32):
    return torch.randn(batch, 1, *[size] * spatial_dims, generator=torch.Generator().manual_seed(0))


def fingerprint(net):
    return (
        [name for name, _ in net.named_modules()],
        list(net.state_dict()),
        [name for name, _ in net.named_buffers()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()],
    )


class Recorder:
    """Inputs and outputs of modules, as the modules saw them."""

    def __init__(self, **modules):
        self.inputs, self.outputs = {}, {}
        for name, module in modules.items():
            module.register_forward_hook(lambda m, args, out, name=name: self.outputs.update({name: out}))
            module.register_forward_pre_hook(lambda m, args, name=name: self.inputs.update({name: args}))


@pytest.mark.parametrize(
    "make",
    [lambda: unet(num_res_units=0), lambda: unet(channels=(4, 6))],
    ids=["without residuals", "of two stages"],
)
def test_stages_state_dict_and_evaluation(make):
    """Of networks as `test_monai_networks` does not build them."""
    net, x = make(), image()
    net(x)  # batch norm statistics that are not the initial ones
    net.eval()
    before, keys = net(x), list(net.state_dict())
    assert insert_ffa(net, prob=1.0) is net
    widths = [4, 6] if len(ffa_layers(net)) == 2 else list(WIDTHS)
    assert list(ffa_layers(net)) == [f"enc{i}" for i in range(1, len(widths) + 1)]
    assert [layer.num_channels for layer in ffa_layers(net).values()] == widths
    assert list(net.state_dict()) == keys
    assert torch.equal(net(x), before)
    assert all(layer.num_active_batches == 0 for layer in ffa_layers(net).values())
    net.train()
    assert torch.isfinite(net(x)).all()
    assert all(layer.num_active_batches == 1 for layer in ffa_layers(net).values())


@pytest.mark.parametrize("make", [basic_unet, unet])
def test_removal_leaves_the_pristine_network(make):
    net = make()
    x = image()
    before, result = fingerprint(net), net.eval()(x)
    for _ in range(2):
        net.train()
        insert_ffa(net, prob=1.0)(x)
        assert fingerprint(net) != before
        assert remove_ffa(net) is net
        assert fingerprint(net) == before
        assert not ffa_layers(net)
    fresh = make()
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(net.eval()(x), fresh.eval()(x))
    assert result.shape == net(x).shape
    torch.jit.script(net)
    assert fingerprint(remove_ffa(make())) == before


def test_unet_skips_are_clean():
    num_res_units = 2
    net = unet(num_res_units=num_res_units)
    recorded, level, modules = [], net.model, {}
    for depth in range(4):
        down, skip, up = level
        modules.update({f"down{depth}": down, f"skip{depth}": skip, f"up{depth}": up})
        recorded.append(skip.submodule)
        modules[f"inner{depth}"] = skip.submodule[0] if depth < 3 else skip.submodule
        level = skip.submodule
    insert_ffa(net, prob=1.0)
    seen = Recorder(**modules)
    net(image())
    for depth in range(4):
        clean = seen.outputs[f"down{depth}"]
        width = clean.shape[1]
        assert seen.inputs[f"skip{depth}"][0] is clean
        assert torch.equal(seen.inputs[f"up{depth}"][0][:, :width], clean)
        augmented = seen.inputs[f"inner{depth}"][0]
        assert augmented.shape == clean.shape
        assert not torch.equal(augmented, clean)
    bottom = seen.outputs["inner3"]
    reached = seen.inputs["up3"][0][:, WIDTHS[3] :]
    assert reached.shape == bottom.shape
    assert torch.equal(reached, bottom)
    assert ffa_layers(net)["enc5"].num_active_batches == 1


def test_layers_follow_the_network():
    make = unet
    net = insert_ffa(make().double())
    assert all(layer.training for layer in ffa_layers(net).values())
    net.eval()
    assert not any(layer.training for layer in ffa_layers(net).values())
    net.to("meta")
    assert all(layer.running_mean.device.type == "meta" for layer in ffa_layers(net).values())
    frozen = make().eval()
    assert not any(layer.training for layer in ffa_layers(insert_ffa(frozen)).values())
    on_meta = insert_ffa(make().to("meta"))
    assert all(layer.gamma_std.device.type == "meta" for layer in ffa_layers(on_meta).values())


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        ([1], ["enc1"]),
        ([1, 5], ["enc1", "enc5"]),
        (["enc2", 3], ["enc2", "enc3"]),
        ([5, 4], ["enc5", "enc4"]),
        ([1, "upcat_4"], ["enc1", "upcat_4"]),
    ],
)
def test_some_stages(stages, names):
    net = insert_ffa(basic_unet(), stages=stages, prob=1.0)
    assert list(ffa_layers(net)) == names
    net(image())
    assert all(layer.num_active_batches == 1 for layer in ffa_layers(net).values())


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layer2 = nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2)
        )
        # A container whose `forward` runs through its children by name, as dense blocks do.
        self.blocks = Blocks({"a": nn.Conv2d(6, 6, 1), "b": nn.Conv2d(6, 6, 1)})
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(6 * 64, 3))

    def forward(self, x):
        return self.head(self.blocks(self.layer2(self.layer1(x))))


class Blocks(nn.ModuleDict):
    def forward(self, x):
        for _, block in self.items():
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("stages", "widths"),
    [
        (["layer1", "layer2"], [4, 6]),
        (["layer2.3"], [3]),
        (["blocks"], [6]),
        (["layer1.1", "layer2.1"], [4, 6]),
    ],
)
def test_any_network_by_module_names(stages, widths):
    net = Encoder()
    before = fingerprint(net)
    x = image(size=16)
    result = net.eval()(x)
    if stages == ["layer2.3"]:
        with pytest.raises(ValueError, match=r"stage 'layer2\.3' of Encoder is unknown, or its number of"):
            insert_ffa(net, stages=stages)
    else:
        insert_ffa(net, stages=stages, prob=1.0)
        assert list(ffa_layers(net)) == list(stages)
        assert [layer.num_channels for layer in ffa_layers(net).values()] == widths
        assert torch.equal(net(x), result)
        assert torch.isfinite(net.train()(x)).all()
        assert all(layer.num_active_batches == 1 for layer in ffa_layers(net).values())
        remove_ffa(net)
    assert fingerprint(net) == before


def test_a_bare_sequential_network():
    net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), nn.Conv2d(4, 2, 3))
    x = image(size=8)
    insert_ffa(net, stages=["0"], prob=1.0)
    torch.manual_seed(0)
    expected = net[1](copy.deepcopy(ffa_layers(net)["0"])(torch.relu(net[0][0](x))))
    torch.manual_seed(0)
    torch.testing.assert_close(net(x), expected)


@pytest.mark.parametrize(
    ("make", "stages", "message"),
    [
        (basic_unet, [6], "stage 6 of BasicUNet is unknown.* choose from enc1, enc2, enc3, enc4, enc5, 1, 2"),
        (basic_unet, [0], "stage 0 of"),
        (basic_unet, ["enc6"], "stage 'enc6' of BasicUNet is unknown.*conv_0"),
        (basic_unet, [""], "stage '' of"),
        (basic_unet, [], "at least one"),
        (basic_unet, [1, "enc1"], "must be different"),
        (Encoder, None, "stages of Encoder are not known .*BasicUNet.*layer1, .*blocks"),
        (Encoder, [1], "stage 1 of Encoder is unknown.* choose from modules such as layer1"),
        (Encoder, ["head"], "stage 'head' of Encoder is unknown, or its number of channels is"),
        (lambda: AutoEncoder(2, 1, 1, (4, 4), (2, 2)), None, "AutoEncoder are not known"),
    ],
)
def test_impossible_stages_change_nothing(make, stages, message):
    net = make()
    before = fingerprint(net)
    with pytest.raises(ValueError, match=message):
        insert_ffa(net, stages=stages)
    assert fingerprint(net) == before


def compiled_in_place(net):
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda net: torch.compile(net, backend="eager"), "OptimizedModule is compiled.*compile.insert_ffa"),
        (compiled_in_place, "UNet is compiled and would ignore FFA layers"),
        (lambda net: nn.Sequential(torch.jit.script(nn.ReLU())), "Sequential is compiled"),
    ],
)
def test_wrapped_networks_are_refused_with_the_call_that_works(wrap, message):
    wrapped = wrap(unet())
    before = fingerprint(wrapped)
    with pytest.raises(ValueError, match=message):
        insert_ffa(wrapped)
    assert fingerprint(wrapped) == before


def test_inserting_twice_is_refused():
    net = insert_ffa(unet(), stages=[1])
    with pytest.raises(ValueError, match="already has FFA layers: remove them first"):
        insert_ffa(net, stages=[2])
    assert list(ffa_layers(net)) == ["enc1"]


def test_layers_that_the_network_class_builds_stay():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), FFALayer(4, prob=1.0), nn.Conv2d(4, 2, 3))
    assert list(ffa_layers(net)) == ["1"]
    insert_ffa(net, stages=["2"])
    assert list(ffa_layers(net)) == ["2", "1"]
    remove_ffa(net)
    assert list(ffa_layers(net)) == ["1"]
    assert isinstance(net[1], FFALayer)
