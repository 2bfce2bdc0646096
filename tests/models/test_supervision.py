"""Deep supervision: the loss over several heads, and the finest head for everybody else."""

import pytest
import torch
from asked_plans import asked, prints_of
from monai.losses import DiceCELoss
from running import TINY_NETWORK
from small_networks import SEGMENTING, build_small
from torch import nn

from medfedaug.config.plan import Plan
from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation.composition import Composition
from medfedaug.federation.in_process import run_in_process
from medfedaug.federation.planning.planner import make_plan
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods import parse_methods
from medfedaug.models import build_network
from medfedaug.models.execution import run_in_bfloat16
from medfedaug.models.networks import supervises
from medfedaug.models.supervision import DeepSupervision, head_weights, network_heads

PLUS = "monai.networks.nets.BasicUNetPlusPlus"
SMALL = {**SEGMENTING, PLUS: {"features": (4, 4, 4, 8, 8, 4), "norm": "batch"}}
DEEP = {
    "dynunet": {"deep_supervision": True, "deep_supr_num": 2},
    "segresnetds": {"dsdepth": 2},
    PLUS: {"deep_supervision": True},
    "mednext": {"deep_supervision": True},
}
SITES = ["site_A", "site_B"]


def heads_of(name, raw):
    """Written out for each network: the finest first."""
    if name == "dynunet":
        return [raw[:, 0], raw[:, 1], raw[:, 2]]
    return raw[::-1] if name == PLUS else list(raw)


def reference(heads, labels):
    """Each head weighs half of the one before; labels are taken at the middle of a coarse voxel."""
    total, weights = 0.0, 0.0
    loss = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    for level, head in enumerate(heads):
        target = labels
        for axis, size in enumerate(head.shape[2:], start=2):
            factor = labels.shape[axis] / size
            index = ((torch.arange(size) + 0.5) * factor).long()
            target = target.index_select(axis, index)
        total, weights = total + loss(head, target) / 2**level, weights + 1 / 2**level
    return total / weights


@pytest.mark.parametrize(("name", "spatial_dims"), [*((name, 2) for name in DEEP), ("dynunet", 3)])
def test_the_loss_is_the_weighted_sum_over_the_heads(name, spatial_dims):
    torch.manual_seed(0)
    net = build_small(name, spatial_dims=spatial_dims, **{**SMALL[name], **DEEP[name]})
    x = torch.rand(2, 1, *(32, 32, 16)[:spatial_dims])
    labels = torch.randint(2, x.shape)
    expected = heads_of(name, net.train()(x))
    assert len(expected) == {"dynunet": 3, PLUS: 4, "segresnetds": 2, "mednext": 3}[name]
    loss = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    criterion = DeepSupervision(net).criterion(loss)
    outputs = net(x)
    assert outputs.shape == (2, 2, *x.shape[2:])
    torch.testing.assert_close(outputs, expected[0])
    torch.testing.assert_close(criterion(outputs, labels), reference(expected, labels))
    # A pass in between does not matter: heads belong to the outputs that they came with.
    before = criterion(outputs, labels)
    net(x + 1)
    assert torch.equal(criterion(outputs, labels), before)
    with torch.no_grad():
        finest = net.eval()(x)
    assert finest.shape == outputs.shape
    assert torch.equal(criterion(finest, labels), loss(finest, labels))


def test_weights_are_halved_per_level_and_add_up_to_one():
    assert head_weights(1) == [1.0]
    assert head_weights(3) == pytest.approx([4 / 7, 2 / 7, 1 / 7])


@pytest.mark.parametrize("name", DEEP)
def test_a_plan_gives_a_network_its_heads(name):
    """The number of heads is nnU-Net's, whose coarsest level has no weight."""
    shared = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    net = build_network(name, supervised=True, **shared, **SMALL[name]).train()
    heads = network_heads(net, net(torch.rand(2, 1, 32, 32)))
    assert len(heads) == {"dynunet": 3, PLUS: 4, "segresnetds": 2, "mednext": 3}[name]
    assert supervises(name)
    config = RunConfig(network=name, network_args=SMALL[name], plan=Plan(deep_supervision=True))
    assert set(Composition(config).network.state_dict()) == set(net.state_dict())


def test_arguments_of_the_network_come_before_the_plan():
    plan, args = Plan(deep_supervision=True), {**SEGMENTING["dynunet"], "deep_supervision": False}
    net = Composition(RunConfig(network="dynunet", network_args=args, plan=plan)).network
    assert len(network_heads(net, net.train()(torch.rand(2, 1, 32, 32)))) == 1
    with pytest.raises(ConfigError, match=r"network basicunet: it has one output.*dynunet.* have them"):
        Composition(RunConfig(plan=plan))
    assert not supervises("basicunet")


def test_a_plan_that_is_made_supervises_networks_that_have_heads():
    def choose(**changes):
        result = make_plan(prints_of(A=((32, 32, 32), (1.0, 1.0, 1.0), 12)), asked(memory=0.5, **changes))
        return result.changes["plan"].deep_supervision, dict(result.reasons)

    small = {"network": "dynunet", "network_args": {"filters": [4, 4, 8, 8, 8]}}
    yes, reasons = choose(**small)
    assert yes
    assert reasons["deep_supervision yes"] == "dynunet has several heads"
    no, reasons = choose(**small, given=["deep_supervision"], plan=Plan())
    assert not no
    assert reasons["deep_supervision no"] == "given"
    assert not choose(**TINY_NETWORK)[0]


def test_one_head_is_left_alone_and_anything_else_is_refused():
    net = build_small("segresnet")
    x, labels = torch.rand(2, 1, 16, 16), torch.randint(2, (2, 1, 16, 16))
    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    before = net(x)
    criterion = DeepSupervision(net).criterion(loss)
    assert torch.equal(net(x), before)
    assert torch.equal(criterion(net(x), labels), loss(before, labels))
    with pytest.raises(TypeError, match=r"Identity gives Tensor, NoneType; scores of the classes are needed"):
        network_heads(nn.Identity(), (x, None))


def test_heads_in_bfloat16_come_back_in_float32():
    net = run_in_bfloat16(build_small("segresnetds", dsdepth=2)).train()
    heads = network_heads(net, net(torch.rand(2, 1, 16, 16)))
    assert [head.dtype for head in heads] == [torch.float32] * 2


def deep_config(name, methods, settings=None, **changes):
    args = {**SEGMENTING[name], **DEEP[name], **({} if name == "mednext" else {"norm": "batch"})}
    specs = tuple(parse_methods(methods, settings))
    values = {"network": name, "network_args": args, "rounds": 1, "limit": 1, "batch_size": 4, **changes}
    return RunConfig(methods=specs, **values)


def test_a_site_trains_on_all_heads(phantom_dir):
    """One step over all of a site's slices at once, so that the loss is known beforehand."""
    name = "dynunet"
    config = deep_config(name, "fedavg", local_steps=1, batch_size=64, learning_rate=1e-9)
    server = run_in_process(config, phantom_dir, SITES, "cpu")
    for site in SITES:
        trainer = SiteTrainer(config, phantom_dir, "cpu")
        trainer.open(site)
        ((images, labels),) = trainer.samples.batches(trainer.samples.training())
        heads = heads_of(name, Composition(config).network.train()(images))
        reported = server.rounds[0]["sites"][site]["train_loss"]
        assert reported == pytest.approx(float(reference(heads, labels)), rel=1e-4)


# Methods that run the network again, take gradients elsewhere or by the images, or look at the outputs.
@pytest.mark.all_layers
def test_methods_get_the_finest_head(phantom_dir):
    config = deep_config("dynunet", "fedrdn,fedfa+,fedfd,fedsam", rounds=2)
    server = run_in_process(config, phantom_dir, SITES, "cpu")
    results = server.results()
    assert [entry["refused"] for entry in results["rounds"]] == [[], []]
    assert all(bool(torch.isfinite(value).all()) for value in server.state.values())
    assert all(0 <= scores["dice"] <= 1 for scores in results["test"]["sites"].values())


def test_a_network_that_gives_something_else_is_named(phantom_dir):
    args = {"patch_size": 16, "hidden_size": 12, "mlp_dim": 8, "num_layers": 1, "num_heads": 2}
    config = RunConfig(network="monai.networks.nets.ViT", network_args=args, image_size=32, limit=1)
    with pytest.raises(MedFedAugError, match=r"ViT gives Tensor, list; scores of the classes"):
        run_in_process(config, phantom_dir, SITES, "cpu")
