"""FFA layers in networks: their places, unchanged skip connections, and complete removal."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from monai.networks.nets import AutoEncoder, BasicUNet, UNet
from small_networks import build_small
from torch import nn

from medfedaug.models import FFALayer, ffa_layers, insert_ffa, network_names, remove_ffa
from medfedaug.models.insertion import FFAArguments
from medfedaug.models.stages import known_stages

WIDTHS = (4, 6, 8, 10, 12)


def basic_unet(spatial_dims=2):
    return BasicUNet(spatial_dims, 1, 2, features=(*WIDTHS, 4), norm="batch")


def unet(spatial_dims=2, num_res_units=2, channels=WIDTHS):
    strides = (2,) * (len(channels) - 1)
    return UNet(
        spatial_dims, 1, 2, channels=channels, strides=strides, num_res_units=num_res_units, norm="batch"
    )


NETWORKS = {
    "basicunet": basic_unet,
    "unet": unet,
    "unet without residuals": lambda spatial_dims=2: unet(spatial_dims, num_res_units=0),
    "unet of two stages": lambda spatial_dims=2: unet(spatial_dims, channels=(4, 6)),
}
every_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())


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


@every_network
@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_stages_state_dict_and_evaluation(make, spatial_dims):
    net = make(spatial_dims)
    x = image(spatial_dims, batch=2)
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


@every_network
def test_training_differs_exactly_by_the_layers(make):
    net = make()
    x = image()
    plain = copy.deepcopy(net)
    assert torch.equal(insert_ffa(net, prob=0.0)(x), plain(x))
    for layer in ffa_layers(net).values():
        layer.prob = 1.0
    assert not torch.equal(net(x), plain(x))


@every_network
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


def test_basic_unet_skips_are_clean():
    net = insert_ffa(basic_unet(), prob=1.0)
    seen = Recorder(
        conv_0=net.conv_0,
        **{f"down_{i}": getattr(net, f"down_{i}") for i in range(1, 5)},
        **{f"convs_{i}": getattr(net, f"down_{i}").convs for i in range(1, 5)},
        **{f"upcat_{i}": getattr(net, f"upcat_{i}") for i in range(1, 5)},
    )
    net(image())
    stages = ["conv_0", "down_1", "down_2", "down_3", "down_4"]
    for i in range(1, 5):
        skip = seen.inputs[f"upcat_{i}"][1]
        # Untouched: the very tensor that the previous stage returned.
        assert skip is seen.outputs[stages[i - 1]]
        pooled = torch.nn.functional.max_pool2d(skip, 2)
        assert not torch.equal(seen.inputs[f"convs_{i}"][0], pooled)
        # The same normalised feature, so the augmentation acted once and on the pooled feature.
        x, y = pooled.flatten(2), seen.inputs[f"convs_{i}"][0].flatten(2)
        correlation = ((x - x.mean(-1, True)) * (y - y.mean(-1, True))).sum(-1)
        correlation = correlation / (x.std(-1) * y.std(-1) * (x.shape[-1] - 1) + 1e-12)
        varies = x.std(-1) > 1e-4
        torch.testing.assert_close(
            correlation[varies].abs(), torch.ones_like(correlation[varies]), atol=1e-2, rtol=0
        )
    # The bottleneck is augmented on its way to the decoder.
    assert not torch.equal(seen.inputs["upcat_4"][0], seen.outputs["convs_4"])


@pytest.mark.parametrize("num_res_units", [0, 2])
def test_unet_skips_are_clean(num_res_units):
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


@every_network
def test_copies_use_their_own_layers(make):
    net = insert_ffa(make(), prob=1.0, momentum=0.5)
    x = image()
    net(x)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(buffer, weights_only=False),
    ):
        assert list(ffa_layers(other)) == list(ffa_layers(net))
        other(x)
        assert all(layer.num_active_batches == 2 for layer in ffa_layers(other).values())
        assert all(layer.num_active_batches == 1 for layer in ffa_layers(net).values())
        torch.manual_seed(0)
        first = net.train()(x)
        for layer in ffa_layers(net).values():
            layer.num_active_batches.fill_(1)
        torch.manual_seed(0)
        assert torch.equal(other(x), first)
        remove_ffa(other)
        assert len(ffa_layers(net)) > 0


@every_network
def test_checkpoints_are_interchangeable(make):
    net, plain = insert_ffa(make()), make()
    plain.load_state_dict(net.state_dict())
    net.load_state_dict(plain.state_dict())
    x = image()
    assert torch.equal(net.eval()(x), plain.eval()(x))


@every_network
def test_layers_follow_the_network(make):
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


def test_arguments_reach_the_layers():
    net = insert_ffa(unet(), prob=0.25, momentum=0.5, variance="client", running="continue")
    for name, layer in ffa_layers(net).items():
        assert (layer.prob, layer.momentum, layer.variance, layer.running) == (
            0.25,
            0.5,
            "client",
            "continue",
        )
        assert f"stage='{name}'" in repr(layer)


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
        ({"layer1": 4, "layer2.3": 6}, [4, 6]),
        ({"layer1.2": 4}, [4]),
    ],
)
def test_any_network_by_module_names(stages, widths):
    net = Encoder()
    before = fingerprint(net)
    x = image(size=16)
    result = net.eval()(x)
    if stages == ["layer2.3"]:
        with pytest.raises(
            ValueError, match=r"stage 'layer2\.3': the number of channels of MaxPool2d is not known"
        ):
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


def test_wrong_number_of_channels_shows_at_the_first_training_step():
    net = insert_ffa(Encoder(), stages={"layer1": 5})
    net.eval()(image(size=16))
    with pytest.raises(
        ValueError, match=r"FFA layer layer1: expected .*\(B, 5, \*spatial\), got \[2, 4, 16, 16\]"
    ):
        net.train()(image(size=16))


def test_modules_that_do_not_return_a_tensor():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)

        def forward(self, x):
            return self.conv(x), x

    net = nn.Sequential(Pair())
    insert_ffa(net, stages=["0"])
    with pytest.raises(
        TypeError, match="stage '0': FFA needs the output of the module to be a tensor, got tuple"
    ):
        net(image(size=8))


@pytest.mark.parametrize(
    ("make", "stages", "message"),
    [
        (basic_unet, [6], "unknown stage 6 of BasicUNet, known: 1 to 5, enc1, enc2, enc3, enc4, enc5"),
        (basic_unet, [0], "unknown stage 0"),
        (basic_unet, [True], "unknown stage True"),
        (basic_unet, ["enc6"], "unknown stage 'enc6' of BasicUNet.*conv_0"),
        (basic_unet, [""], "unknown stage ''"),
        (basic_unet, [], "stages is empty"),
        (basic_unet, "enc1", "expected a list of stages"),
        (basic_unet, [1, "enc1"], "occurs twice"),
        (Encoder, None, "stages of Encoder are not known .*BasicUNet.*layer1, .*blocks"),
        (Encoder, [1], "unknown stage 1 of Encoder, modules are for example: layer1"),
        (Encoder, ["layer3"], "unknown stage 'layer3' of Encoder"),
        (Encoder, ["head"], "stage 'head': the number of channels of Sequential is not known"),
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
        (lambda net: nn.Sequential(torch.jit.script(nn.ReLU())), "Sequential is TorchScript"),
        (
            nn.DataParallel,
            r"DataParallel are not known, but the stages of its part UNet .* insert_ffa\(net.module\)",
        ),
    ],
)
def test_wrapped_networks_are_refused_with_the_call_that_works(wrap, message):
    wrapped = wrap(unet())
    before = fingerprint(wrapped)
    with pytest.raises(ValueError, match=message):
        insert_ffa(wrapped)
    assert fingerprint(wrapped) == before


def test_a_compiled_network_would_go_on_without_layers():
    """PyTorch ignores hooks that are registered after the first pass, without a warning."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    compiled = torch.compile(net, backend="eager")
    compiled(image(size=8))
    calls = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    compiled(image(size=8))
    assert not calls


def test_impossible_layers_change_nothing():
    net = basic_unet()
    before = fingerprint(net)
    with pytest.raises(ValueError, match="prob is 2"):
        insert_ffa(net, prob=2)
    assert fingerprint(net) == before


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


def test_other_hooks_survive():
    net = basic_unet()
    calls = []
    net.down_1.max_pooling.register_forward_hook(lambda *_: calls.append(1))
    remove_ffa(insert_ffa(net))(image())
    assert calls == [1]


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    # Not BasicUNet: its own code breaks the graph at `torch.jit.isinstance`.
    net = insert_ffa(unet(num_res_units=0, channels=(4, 6, 8)), prob=0.5)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.manual_seed(0)
    for _ in range(20):
        compiled(image(size=16))
    assert all(0 < layer.num_active_batches < 20 for layer in ffa_layers(net).values())
    counts = {int(layer.num_active_batches) for layer in ffa_layers(net).values()}
    assert len(counts) > 1, "the layers are active or not independently of each other"


@pytest.mark.parametrize("name", [name for name in network_names() if name != "vit"])  # has no stages
def test_stages_are_the_same_with_layers_in_place(name):
    net = build_small(name, in_channels=1, out_channels=4)
    before = known_stages(net)
    assert before
    assert known_stages(insert_ffa(net)) == before


def test_torchscript_says_what_to_do():
    net = insert_ffa(BasicUNet(2, 1, 2, features=(4,) * 6))
    with pytest.raises(AttributeError, match=r"cannot compile FFA layers.*call remove_ffa\(net\) before"):
        torch.jit.script(net)
    torch.jit.script(remove_ffa(net))


def test_the_command_says_how_to_name_unknown_stages(run, phantom_dir, tmp_path):
    code, _, err = run(
        *("simulate", "--data", phantom_dir, "--out", tmp_path / "o", "--methods", "fedfa"),
        *("--network", "monai.networks.nets.HighResNet", "--engine", "inprocess"),
    )
    assert code == 2
    assert "--set 'METHOD.stages=[...]'" in " ".join(err.split())


def test_type_checkers_know_every_argument_of_the_layer():
    assert [*inspect.signature(FFALayer).parameters] == ["num_channels", *FFAArguments.__annotations__]


def test_a_class_in_place_of_a_network_is_named():
    with pytest.raises(TypeError, match=r"^UNet is a class: make a network of it first, as UNet\(\.\.\.\)$"):
        insert_ffa(UNet)
