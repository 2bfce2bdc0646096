"""FedSR: its draw and its two terms, what is averaged, and what it refuses."""

import math

import pytest
import torch
from reference import UNEVEN, assert_models, assert_same, federated_averaging, mean, same
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from medfedaug.federation import run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.methods.base import SiteContext, Step
from medfedaug.research.methods.fedproto import FedProto
from medfedaug.research.methods.fedsr import FedSR, gaussian_kl
from medfedaug.tasks import ClassificationTask

SITES = ["A", "B"]


def test_the_divergence_of_gaussians_is_its_definition():
    generator = torch.Generator().manual_seed(0)
    mean, other = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    std, spread = (torch.rand(4, 3, generator=generator, dtype=torch.float64) + 0.2 for _ in range(2))
    result = gaussian_kl(mean, std, other, spread)
    for n in range(4):
        expected = 0.0
        for m, s, a, b in zip(mean[n], std[n], other[n], spread[n], strict=True):
            expected += math.log(b / s) + (s**2 + (m - a) ** 2) / (2 * b**2) - 0.5
        assert float(result[n]) == pytest.approx(float(expected), rel=1e-12)
    normal = torch.distributions.Normal
    theirs = torch.distributions.kl_divergence(normal(mean, std), normal(other, spread)).sum(dim=1)
    torch.testing.assert_close(result, theirs)
    assert float(gaussian_kl(mean, std, mean, std).abs().max()) == 0


# ---------------------------------------------------------------- one step


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def begun(**args):
    network = small_network()
    method = FedSR(**args)
    method.prepare_network(network)
    site = method.at_site(SiteContext("A", network))
    site.start_round()
    return network.train(), site


def batch(size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=generator)


def test_a_deviation_that_rounds_to_zero_has_a_finite_loss():
    network, site = begun()
    site.representation.deviation.bias.data.fill_(-1e4)
    x, y = batch(3)
    outputs = network(x)
    loss = site.loss(Step(network, x, y, outputs))
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(site.representation.deviation.bias.grad).all())
    torch.testing.assert_close(outputs, small_network()(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("first", ["fedsr", "fedproto"])
def test_other_methods_see_the_draw_in_whatever_order(first):
    network = small_network()
    method, task = FedSR(), ClassificationTask(["a", "b", "c"], scale=True)
    method.prepare_network(network)
    context = SiteContext("A", network, task=task)
    parts = {}
    for name, other in sorted({"fedsr": method, "fedproto": FedProto()}.items(), reverse=first == "fedsr"):
        parts[name] = other.at_site(context)
    assert next(iter(parts)) == first
    network.train()(batch(4)[0])
    z, mean, _ = parts["fedsr"]._drawn
    assert not torch.equal(z, mean)
    assert torch.equal(parts["fedproto"].last_features(), z)


# ---------------------------------------------------------------- federation


def test_a_second_gradient_is_of_the_same_draw(photo_config, tmp_path):
    """With a radius of zero FedSAM's second pass must change nothing."""
    plain = run_in_process(photo_config("fedsr"), tmp_path / "photos", SITES, "cpu")
    flat = photo_config("fedsr,fedsam", {"fedsam": {"rho": 0}})
    again = run_in_process(flat, tmp_path / "photos", SITES, "cpu")
    assert same(again.state, plain.state)
    assert same(again.payload, plain.payload)


L2, CMI, RATE = 0.05, 0.1, 0.2


def test_the_head_learns_from_draws_that_hold_little(federate):
    settings = {"fedsr": {"l2": L2, "cmi": CMI, "learning_rate": RATE}}
    run = federate("fedsr", plan=UNEVEN, settings=settings, local_epochs=2)
    method = next(m for m in Composition(run.config).methods if m.name == "fedsr")
    start = {key: value.double() for key, value in method.representation().state_dict().items()}
    sent, common = {}, {}

    def train(site, round_, network):
        if round_ > 1 and round_ not in common:
            sites = sent[round_ - 1]
            common[round_] = mean(list(sites.values()), [run.server.sites[one] for one in sites])
        extra = {**start, **common.get(round_, {})}
        extra = {key: value.clone().requires_grad_() for key, value in extra.items()}
        network.train()
        batches = run.batches[site, round_]
        for (x, y), draws in zip(batches, batches.draws, strict=True):
            mu = network.encoder(x).mean((2, 3))
            sigma = softplus(mu @ extra["deviation.weight"].T + extra["deviation.bias"]) + 1e-6
            z = mu + sigma * draws[0].double()
            m, s = extra["means"][y], softplus(extra["spreads"][y]) + 1e-6
            divergence = (s / sigma).log() + (sigma.square() + (mu - m).square()) / (2 * s.square()) - 0.5
            loss = cross_entropy(network.head[2](z), y) + L2 * z.square().sum(1).mean()
            loss = loss + CMI * divergence.sum(1).mean()
            parameters = list(network.parameters())
            gradients = torch.autograd.grad(loss, [*parameters, *extra.values()])
            with torch.no_grad():
                for index, value in enumerate([*parameters, *extra.values()]):
                    value -= (0.05 if index < len(parameters) else RATE) * gradients[index]
        sent.setdefault(round_, {})[site] = {key: value.detach() for key, value in extra.items()}

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    for round_, sites in sent.items():
        for site, expected in sites.items():
            payload = run.replies[round_][site].payload
            assert_same({k.removeprefix("fedsr/"): v for k, v in payload.items()}, expected, atol=2e-6)
