"""gPerXAN against Le et al., CVPR 2024: assembled norms, and the loss of the global model's last layer."""

from __future__ import annotations

import pytest
import torch
from reference import (
    UNEVEN,
    Round,
    assert_models,
    assert_same,
    assert_scores,
    copied,
    entries,
    mean,
    pixels,
    same,
)
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, linear

from medfedaug.errors import ConfigError
from medfedaug.methods import GPerXAN
from medfedaug.methods.base import SiteContext, Step
from medfedaug.models import build_network
from medfedaug.models.assembled_norm import assemble_norms

NORMS = ("encoder.0.1", "encoder.1.1")
NETWORK = {"network": "reference_convolutional", "local_epochs": 2}


def features_of(network, x, branches, state=None):
    """z of `reference.convolutional` with XAN; of the batch, or with the running statistics of ``state``."""
    for stage, norm, branch in zip(network.encoder, NORMS, branches, strict=True):
        x = conv2d(x, stage[0].weight, stage[0].bias, padding=1)
        n = x.numel() / x.shape[1]
        if state is None:
            mu, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            with torch.no_grad():  # PyTorch's running statistics
                stage[1].running_mean.mul_(0.9).add_(0.1 * mu)
                stage[1].running_var.mul_(0.9).add_(0.1 * var * n / (n - 1))
        else:
            mu, var = state[f"{norm}.running_mean"], state[f"{norm}.running_var"]
        batch = (x - mu[:, None, None]) / torch.sqrt(var + stage[1].eps)[:, None, None]
        batch = batch * stage[1].weight[:, None, None] + stage[1].bias[:, None, None]
        own = x.mean((2, 3), keepdim=True)
        spread = ((x - own) ** 2).mean((2, 3), keepdim=True)
        instance = (x - own) / torch.sqrt(spread + stage[1].eps)
        instance = instance * branch["weight"][:, None, None] + branch["bias"][:, None, None]
        shares = torch.exp(branch["scores"]) / torch.exp(branch["scores"]).sum()
        x = torch.tanh(shares[0] * batch + shares[1] * instance)
        x = x.unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(4, 5))
    return x.mean(dim=(2, 3))


def beginning():
    def one(*size):
        return torch.ones(*size).double()

    return [{"weight": one(c), "bias": one(c) * 0, "scores": one(2)} for c in (4, 5)]


def kept(key):
    return key.startswith(NORMS)


def by_hand(run, weight):
    """Rounds, and the shared branches after each."""
    start, own, shared, rounds, averages = run.network(), {}, beginning(), [], []
    model = {key: value for key, value in entries(start).items() if not kept(key)}
    for round_ in range(1, run.config.rounds + 1):
        local, branches_of = {}, {}
        for site in run.took_part(round_):
            network = copied(start, {**own.get(site, {}), **model}).train()
            branches = [{k: v.clone().requires_grad_() for k, v in one.items()} for one in shared]
            head = network.head[2]
            received = head.weight.detach().clone(), head.bias.detach().clone()
            for x, y in run.batches[site, round_]:
                z = features_of(network, x, branches)
                loss = cross_entropy(linear(z, head.weight, head.bias), y)
                loss = loss + weight * cross_entropy(linear(z, *received), y)
                trained = [*network.parameters(), *(v for one in branches for v in one.values())]
                gradients = torch.autograd.grad(loss, trained)
                with torch.no_grad():
                    for parameter, gradient in zip(trained, gradients, strict=True):
                        parameter.sub_(0.05 * gradient)
            local[site] = entries(network)
            own[site] = {key: value for key, value in local[site].items() if kept(key)}
            branches_of[site] = branches
        weights = [run.server.sites[site] for site in local]
        model = mean([{key: state[key] for key in model} for state in local.values()], weights)
        shared = [
            {k: v.detach() for k, v in mean([one[i] for one in branches_of.values()], weights).items()}
            for i in range(2)
        ]
        rounds.append(Round(model, local))
        averages.append(shared)
    return rounds, averages


def test_norms_are_assembled_and_the_global_head_guides(federate):
    weight = 0.5
    run = federate("gperxan", plan=UNEVEN, settings={"gperxan": {"weight": weight}}, **NETWORK)
    rounds, averages = by_hand(run, weight)
    assert_models(run, rounds)
    last = averages[-1]
    for site in "AC":
        payload = run.replies[3][site].payload
        assert {key.split(".")[-1] for key in payload if "instance" in key} == {
            *("instance_weight", "instance_bias", "instance_scores")
        }
    values = {key.removeprefix("gperxan/"): value for key, value in run.server.payload.items()}
    expected = {f"{n}.instance_{k}": v for n, one in zip(NORMS, last, strict=True) for k, v in one.items()}
    assert_same({key: values[key] for key in expected}, expected)
    assert float((last[0]["scores"] - 1).abs().max()) > 1e-4


def test_an_unseen_site_has_the_average_of_the_batch_norms(federate):
    plan = [("A", "B"), ("A",), ("A", "B")]
    run = federate("gperxan", plan=plan, holdout=("C",), **NETWORK)
    rounds, averages = by_hand(run, 0.5)
    selected = run.server.selected_round
    local = rounds[selected - 1].local
    state = mean(list(local.values()), [run.server.sites[site] for site in local])
    network = copied(run.network(), state).eval()
    with torch.no_grad():
        z = features_of(network, pixels(run, "C", "test") / 255, averages[selected - 1], state)
        assert_scores(run, "C", linear(z, network.head[2].weight, network.head[2].bias))
    # Without it the batch norms stay where they are, and what sites train is the same.
    alone = federate(
        "gperxan", plan=plan, holdout=("C",), settings={"gperxan": {"unseen": "none"}}, **NETWORK
    )
    assert same(alone.models[3], run.models[3])
    assert not [key for key in alone.replies[1]["A"].payload if "running" in key]
    assert alone.tested["C"].metrics["accuracy"] is None


def test_a_last_layer_with_norms_stays_as_it_was_received():
    """MONAI's UNet with residual units has a block for its last layer."""
    torch.manual_seed(0)
    method = GPerXAN(weight=1.0)
    args = {"channels": (4, 8, 8), "strides": (2, 2), "num_res_units": 2, "norm": "batch"}
    network = method.prepare_network(build_network("unet", in_channels=1, out_channels=2, **args))
    part = method.at_site(SiteContext("A", network.train(), optimiser=lambda p: torch.optim.SGD(p, lr=0.1)))
    branches = {key: tensor for key, tensor in part.tensors().items() if "model.2" in key}
    assert branches  # of norms in the last block
    with torch.no_grad():
        for tensor in branches.values():
            tensor += torch.rand_like(tensor)  # as they may come from the server
    part.start_round()
    x, y = torch.rand(2, 1, 16, 16), torch.rand(2, 2, 16, 16)

    def guiding():
        step = Step(network, x, y, network(x), nn.functional.mse_loss)
        part.after_pass(step)
        return part.loss(step)

    first = guiding()
    last = [*part.head.parameters(), *branches.values()]
    assert torch.autograd.grad(first, last, retain_graph=True, allow_unused=True) == (None,) * len(last)
    own = nn.functional.mse_loss(network(x), y)
    torch.testing.assert_close(first, own)  # nothing has moved yet
    before = [torch.autograd.grad(loss, network.model[0].parameters()) for loss in (first, own)]
    torch.testing.assert_close(before[0], before[1])
    with torch.no_grad():
        for tensor in last:
            tensor += torch.rand_like(tensor)
    torch.testing.assert_close(guiding(), first)
    assert not torch.allclose(nn.functional.mse_loss(network(x), y), first)


def test_the_guiding_pass_leaves_no_running_statistics():
    network = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)))
    method = GPerXAN(head="1")
    network = method.prepare_network(network)
    context = SiteContext("A", network.train(), optimiser=lambda p: torch.optim.SGD(p, lr=0.1))
    part = method.at_site(context)
    part.start_round()
    kept = {key: value.clone() for key, value in part._received.items()}
    x = torch.rand(4, 1, 4, 4)
    step = Step(network, x, torch.rand(4, 2, 4, 4), network(x), nn.functional.mse_loss)
    own = entries(network)
    part.after_pass(step)
    part.loss(step)
    assert same(part._received, kept)
    assert same(entries(network), own)


@pytest.mark.parametrize("dims", [2, 3])
def test_an_assembled_norm_in_2d_and_3d(dims):
    torch.manual_seed(0)
    norm = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](3).double().eval()
    norm.running_mean.uniform_()
    norm.weight.data.uniform_()
    x = torch.rand(2, 3, *[4] * dims).double()
    batch, keys = norm(x), list(norm.state_dict())
    assemble_norms(norm)
    assert list(norm.state_dict()) == keys
    vars(norm)["instance"].scores = torch.tensor([0.0, 2.0]).double()
    vars(norm)["instance"].bias = torch.tensor([1.0, 2.0, 3.0]).double()
    flat = x.flatten(2)
    instance = (flat - flat.mean(2, keepdim=True)) / torch.sqrt(
        flat.var(2, unbiased=False, keepdim=True) + norm.eps
    ) + torch.tensor([1.0, 2.0, 3.0])[:, None]
    share = 1 / (1 + torch.e**2)
    torch.testing.assert_close(norm(x).flatten(2), share * batch.flatten(2) + (1 - share) * instance)


def test_gperxan_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="gperxan: Sequential has no batch norm that keeps statistics"):
        GPerXAN().prepare_network(nn.Sequential(nn.InstanceNorm2d(3)))


def test_a_last_layer_that_stays_at_the_site_guides_nobody(federate):
    other = "fedper"
    with pytest.raises(
        ConfigError, match=r"its head\.2\.bias, head\.2\.weight stay at each site; set gperxan"
    ):
        federate(f"gperxan,{other}", plan=UNEVEN, **NETWORK)
    federate(f"gperxan,{other}", plan=UNEVEN, settings={"gperxan": {"weight": 0.0}}, **NETWORK)


def test_the_instance_norms_are_trained_where_the_network_is():
    """A network's own `to` does not know of them, and each pass would copy them to a GPU again."""
    network = GPerXAN().prepare_network(build_network("unet", num_res_units=0)).to("meta")
    tensors = GPerXAN().at_site(SiteContext("site", network)).tensors()
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in tensors.values())
