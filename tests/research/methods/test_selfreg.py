"""SelfReg against the equations of its authors' public code."""

import torch
from reference import UNEVEN, assert_models, assert_same, federated_averaging, mean, share_of
from torch import nn
from torch.nn.functional import cross_entropy, relu

from medfedaug.federation.composition import Composition
from medfedaug.methods.base import SiteContext, Step
from medfedaug.research.methods.selfreg import SelfReg
from medfedaug.tasks import ClassificationTask

LAYERS = (0, 3, 6)


def projected(p, z):
    for layer in LAYERS:
        z = z @ p[f"{layer}.weight"].T + p[f"{layer}.bias"]
        z = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt()
        z = z * p[f"{layer + 1}.weight"] + p[f"{layer + 1}.bias"]
        z = z if layer == LAYERS[-1] else relu(z)
    return z


def partner(labels, chance):
    """The n-th image of a class gets the one with the n-th smallest number of that class."""
    values = [0] * len(labels)
    for label in set(labels.tolist()):
        members = [i for i, one in enumerate(labels.tolist()) if one == label]
        for i, other in zip(members, sorted(members, key=lambda k: float(chance[k])), strict=True):
            values[i] = other
    return values


def loss_of(z, outputs, p, y, draws):
    """The loss, written out image by image."""
    one, two, share = partner(y, draws[0]), partner(y, draws[1]), share_of(draws[2])
    points = projected(p, z)
    whole = cross_entropy(outputs, y)
    terms = torch.zeros((), dtype=torch.float64)
    for i, (j, k) in enumerate(zip(one, two, strict=True)):
        mixed = share * outputs[j] + (1 - share) * outputs[k]
        mixed_point = share * points[j] + (1 - share) * points[k]
        own = ((outputs[i] - outputs[j]) ** 2).mean() + 0.3 * ((z[i] - points[j]) ** 2).mean()
        others = ((outputs[i] - mixed) ** 2).mean() + 0.3 * ((z[i] - mixed_point) ** 2).mean()
        terms = terms + (share * own + (1 - share) * others) / len(y)
    return whole + min(whole.item(), 1.0) * terms


def test_images_are_drawn_to_those_of_their_class(federate):
    run = federate("selfreg", plan=UNEVEN, local_epochs=2)
    method = next(m for m in Composition(run.config).methods if m.name == "selfreg")
    common = {key: value.detach().double() for key, value in method.projection().named_parameters()}
    sent = {}

    def train(site, round_, network):
        nonlocal common
        if round_ > 1 and (round_ - 1) in sent:
            previous = sent.pop(round_ - 1)
            common = mean(list(previous.values()), [run.server.sites[name] for name in previous])
        p = {key: value.clone() for key, value in common.items()}
        network.train()
        batches = run.batches[site, round_]
        for (x, y), draws in zip(batches, batches.draws, strict=True):
            z = network.encoder(x).mean((2, 3))
            weights = {**dict(network.named_parameters()), **p}
            for value in p.values():
                value.requires_grad_()
            loss = loss_of(z, network.head[2](z), p, y, draws) if len(y) > 1 else cross_entropy(network(x), y)
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            with torch.no_grad():
                for value, slope in zip(weights.values(), gradients, strict=True):
                    if slope is not None:
                        value -= run.config.learning_rate * slope
        sent.setdefault(round_, {})[site] = {key: value.detach() for key, value in p.items()}

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    last = sent[run.config.rounds]
    expected = mean(list(last.values()), [run.server.sites[name] for name in last])
    assert_same({key.removeprefix("selfreg/"): value for key, value in run.server.payload.items()}, expected)


def test_a_batch_of_one_image_adds_nothing():
    torch.manual_seed(0)
    network, method = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), SelfReg()
    method.prepare_network(network)
    site = method.at_site(SiteContext("A", network, task=ClassificationTask(["a", "b", "c"], scale=True)))
    x, y = torch.randn(1, 5), torch.tensor([2])
    outputs = network(x)
    assert site.loss(Step(network, x, y, outputs, cross_entropy)) is None
