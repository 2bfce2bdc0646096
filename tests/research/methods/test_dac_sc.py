"""DAC-SC against Lee et al., CVPR 2023: amplitudes and phases by Fourier transforms, in float64."""

import copy
from itertools import pairwise

import pytest
import torch
from monai.networks.nets import DynUNet, resnet18
from reference import UNEVEN, Round, assert_models, assert_same, assert_scores, copied, entries, mean, pixels
from torch import nn
from torch.nn.functional import conv2d, cross_entropy

from medfedaug.models import build_network, networks, remove_layers
from medfedaug.models.classifiers import StagedClassifier
from medfedaug.research.methods.dac_sc import (
    DACSC,
    StyleControlNorm,
    control_shortcuts,
    control_style,
    shortcut_norms,
)


def composed(amplitudes, phases, space):
    """The features of these amplitudes and phases."""
    return torch.fft.ifftn(torch.polar(amplitudes, phases), dim=space).real


def decomposed(x):
    """Amplitudes and phases over space."""
    space = tuple(range(2, x.dim()))
    transformed = torch.fft.fftn(x, dim=space)
    return transformed.abs(), transformed.angle()


def spread(values, x):
    return values.reshape(*values.shape, *[1] * (x.dim() - values.dim()))


def style_controlled(x, shares, weight, bias, eps=1e-5):
    """SCNorm by its definition."""
    space = tuple(range(2, x.dim()))
    middle = x.mean(space, keepdim=True)
    instance = (x - middle) / ((x - middle).square().mean(space, keepdim=True) + eps).sqrt()
    (own, phases), (normal, _) = decomposed(x), decomposed(instance)
    out = composed(shares[0] * normal + shares[1] * own, phases, space)
    return out * spread(weight[None], x) + spread(bias[None], x)


def content_controlled(x, mu, var, content, weight, bias, eps=1e-5):
    """CCNorm by its definition."""
    mu, std = spread(mu[None], x), spread((var + eps).sqrt()[None], x)
    amplitudes, _ = decomposed((x - mu) / std)
    _, phases = decomposed(x - content * mu)
    out = composed(amplitudes, phases, tuple(range(2, x.dim())))
    return out * spread(weight[None], x) + spread(bias[None], x)


@pytest.fixture
def features():
    def make(images, dims):
        torch.manual_seed(images + dims)
        means = 0.5 + torch.randn(images, 3, *[1] * dims)
        return (torch.randn(images, 3, *[5, 4, 3][:dims]) + means).double()

    return make


# ------------------------------------------------------------------ the equations


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("images", [1, 6])
def test_scnorm_is_its_definition(features, images, dims):
    x = features(images, dims).requires_grad_()
    shares = torch.tensor([0.3, 0.7]).double().requires_grad_()
    weight, bias = (torch.rand(3).double().requires_grad_() for _ in range(2))
    result, expected = control_style(x, shares, weight, bias), style_controlled(x, shares, weight, bias)
    torch.testing.assert_close(result, expected)
    along = torch.randn_like(result)
    for one, other in zip(
        *(torch.autograd.grad(out, (x, shares, weight, bias), along) for out in (result, expected)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("content", [0.0, 0.5, 1.0])
def test_ccnorm_is_its_definition_in_training_and_in_evaluation(features, content, dims):
    x = features(32, dims).requires_grad_()
    norm = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](3).double()
    with torch.no_grad():
        norm.weight.uniform_(-1, 1), norm.bias.uniform_()
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    block = nn.Module()
    block.downsample = nn.Sequential(nn.Identity(), copy.deepcopy(norm))
    shortcut = control_shortcuts(block, content).downsample
    space = (0, *range(2, x.dim()))
    for training in (False, True):
        for module in (norm, shortcut):
            module.train(training)
        mu, var = norm.running_mean, norm.running_var
        if training:
            mu, var = x.mean(space), x.var(space, unbiased=False)
        result = shortcut(x)
        expected = content_controlled(x, mu, var, content, norm.weight, norm.bias)
        torch.testing.assert_close(result, expected)
        along = torch.randn_like(result)
        torch.testing.assert_close(
            *(torch.autograd.grad(out, x, along, retain_graph=True)[0] for out in (result, expected))
        )
        plain = norm(x)
        turned = (result - plain).abs().amax(tuple(range(2, x.dim()))) > 1e-9
        assert bool(turned.any()) == (content < 1)
        assert not bool(turned.all())
        if content == 1:
            assert torch.equal(result, plain)
    torch.testing.assert_close(shortcut[1].running_var, norm.running_var)


# ------------------------------------------------------------------ the network


def test_where_the_norms_are_and_that_the_network_keeps_its_entries():
    net = resnet18(spatial_dims=2, n_input_channels=3, num_classes=4)
    keys = list(net.state_dict())
    assert list(shortcut_norms(net)) == [f"layer{i}.0.downsample.1" for i in (2, 3, 4)]
    net = DACSC().prepare_network(net)
    layers = {m.stage: m.num_channels for m in net.modules() if isinstance(m, StyleControlNorm)}
    assert layers == {"enc1": 64, "enc2": 64, "enc3": 128, "enc4": 256}  # and not after the last
    assert list(net.state_dict()) == keys
    assert sum("scnorm" in name for name, _ in net.named_parameters()) == 3 * 4
    x = torch.rand(2, 3, 64, 64)
    other = copy.deepcopy(net).eval()
    with torch.no_grad():
        next(m for m in net.modules() if isinstance(m, StyleControlNorm)).weight.mul_(2)
    assert not torch.allclose(net.eval()(x), other(x))
    other.load_state_dict(net.state_dict())
    assert not torch.allclose(net(x), other(x))
    dyn = DynUNet(2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), norm_name="batch", res_block=True)
    assert all(name.endswith("norm3") for name in shortcut_norms(dyn))
    assert len(shortcut_norms(dyn)) >= 3
    unet = build_network("unet", channels=(4, 8, 8), strides=(2, 2), num_res_units=2, norm="batch")
    assert shortcut_norms(unet) == {}
    before = list(unet.modules())
    assert list(remove_layers(DACSC().prepare_network(unet)).modules()) == before


def test_networks_without_a_place_are_refused():
    with pytest.raises(ValueError, match="stages of Linear are not known"):
        DACSC().prepare_network(nn.Linear(2, 2))
    unetr = build_network("unetr", img_size=32, feature_size=4, hidden_size=12, mlp_dim=8, num_heads=2)
    with pytest.raises(ValueError, match="at least one"):  # it has one, and the last one gets no norm
        DACSC().prepare_network(unetr)


# ------------------------------------------------------------------ the federation


class Block(nn.Module):
    """A residual block, smooth throughout."""

    def __init__(self, a, b):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b))
        self.downsample = nn.Sequential(nn.Conv2d(a, b, 1), nn.BatchNorm2d(b))

    def forward(self, x):
        return torch.tanh(self.main(x) + self.downsample(x))


def residual(in_channels=3, out_channels=2, **_):
    stages = [nn.Sequential(Block(a, b), nn.AvgPool2d(2)) for a, b in pairwise((in_channels, 4, 5))]
    return StagedClassifier(
        stages, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, out_channels))
    )


@pytest.fixture
def run_residual(federate, monkeypatch):
    monkeypatch.setitem(networks._NETWORKS, "reference_residual", residual)

    def run(**options):
        return federate("dac_sc", network="reference_residual", local_epochs=2, **options)

    return run


def outputs(network, x, own):
    """The network's logits; ``own`` has γ, β and h. In training the running statistics move."""
    for number, stage in enumerate(network.encoder):
        parts = []
        for path, controlled in ((stage[0].main, False), (stage[0].downsample, True)):
            z = conv2d(x, path[0].weight, path[0].bias, padding=path[0].padding)
            mu, var = path[1].running_mean, path[1].running_var
            if network.training:
                mu, var, n = z.mean((0, 2, 3)), z.var((0, 2, 3), unbiased=False), z.numel() / z.shape[1]
                with torch.no_grad():
                    path[1].running_mean.mul_(0.9).add_(0.1 * mu)
                    path[1].running_var.mul_(0.9).add_(0.1 * var * n / (n - 1))
            affine = path[1].weight, path[1].bias
            if controlled:
                parts.append(content_controlled(z, mu, var, 0.5, *affine))
            else:
                z = (z - mu[:, None, None]) / (var + 1e-5).sqrt()[:, None, None]
                parts.append(z * affine[0][:, None, None] + affine[1][:, None, None])
        x = torch.tanh(parts[0] + parts[1]).unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))
        if number == 0:
            h = torch.exp(own["scores"] / 0.1)
            x = style_controlled(x, h / h.sum(), own["weight"], own["bias"])
    return network.head(x)


def by_hand(run):
    """Rounds, and the averages of γ, β and h after each."""
    start, rounds, averages = run.network(), [], []
    model = entries(start)
    shared = {"weight": torch.ones(4), "bias": torch.zeros(4), "scores": torch.zeros(2)}
    shared = {key: value.double() for key, value in shared.items()}
    for round_ in range(1, run.config.rounds + 1):
        local, owns = {}, []
        for site in run.took_part(round_):
            network = copied(start, model).train()
            own = {key: value.clone().requires_grad_() for key, value in shared.items()}
            for x, y in run.batches[site, round_]:
                loss = cross_entropy(outputs(network, x, own), y)
                trained = [*network.parameters(), *own.values()]
                with torch.no_grad():
                    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                        parameter.sub_(0.05 * gradient)
            local[site] = entries(network)
            owns.append({key: value.detach() for key, value in own.items()})
        weights = [run.server.sites[site] for site in local]
        model, shared = mean(list(local.values()), weights), mean(owns, weights)
        rounds.append(Round(model, local))
        averages.append(shared)
    return rounds, averages


def test_norms_are_trained_with_the_network_and_averaged(run_residual):
    run = run_residual(plan=UNEVEN)
    rounds, averages = by_hand(run)
    assert_models(run, rounds)
    values = {key.removeprefix("dac_sc/enc1/"): value for key, value in run.server.payload.items()}
    assert_same(values, averages[-1])
    assert float(values["scores"].abs().max()) > 1e-5


def test_an_unseen_site_is_scored_with_the_averages(run_residual):
    run = run_residual(plan=[("A", "B"), ("A",), ("A", "B")], holdout=("C",))
    rounds, averages = by_hand(run)
    selected = run.server.selected_round
    network = copied(run.network(), rounds[selected - 1].model).eval()
    with torch.no_grad():
        logits = outputs(network, pixels(run, "C", "test") / 255, averages[selected - 1])
    assert_scores(run, "C", logits)
