"""FRAug: its equations, what stays at the site, and what it refuses."""

import copy
import math

import pytest
import torch
from monai.metrics import MMDMetric
from reference import UNEVEN, assert_models, assert_same, federated_averaging, mean
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from medfedaug import functional as F
from medfedaug.federation import SiteTrainer
from medfedaug.federation.composition import Composition
from medfedaug.methods import FRAug
from medfedaug.methods.base import SiteContext, Step
from medfedaug.models import build_network

# ---------------------------------------------------------------- functions


def test_mmd_is_the_means_over_all_pairs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 3, generator=generator, dtype=torch.float64) + 1

    def mean(a, b):
        values = [math.exp(-float(((p - q) ** 2).sum()) / (2 * 0.8**2)) for p in a for q in b]
        return sum(values) / len(values)

    expected = mean(x, x) + mean(y, y) - 2 * mean(x, y)
    assert float(F.gaussian_mmd(x, y, 0.8)) == pytest.approx(expected, rel=1e-12)
    one = F.gaussian_mmd(x[:1], y[:1], 0.8)
    assert float(one) == pytest.approx(2 - 2 * mean(x[:1], y[:1]), rel=1e-12)
    # For a wide kernel, k ≈ 1 − |a − b|²/2s², it is MONAI's linear one, but for the pairs of an element with
    # itself, over which MONAI does not take the mean.
    wide = F.gaussian_mmd(x, y, 1e4) * 1e8
    assert float(wide) == pytest.approx(float((x.mean(0) - y.mean(0)).square().sum()), rel=1e-5)
    z = y[:4]
    unbiased = sum(s.var(dim=0).sum() for s in (x, z)) / 4
    monai = MMDMetric()(x, z)
    assert float(F.gaussian_mmd(x, z, 1e4) * 1e8 - unbiased) == pytest.approx(float(monai), rel=1e-5)


def test_the_ramp_is_exponential_and_ends():
    assert [F.ramp_up(t, 40) for t in (0, 10, 39)] == [
        pytest.approx(math.exp(-5 * (1 - t / 40) ** 2)) for t in (0, 10, 39)
    ]
    assert F.ramp_up(40, 40) == F.ramp_up(10**6, 40) == F.ramp_up(0, 0) == 1.0


# ---------------------------------------------------------------- one step


class Classifier(nn.Module):
    """Embeddings are the images themselves, so that a test knows them."""

    def __init__(self, size=6, classes=4):
        super().__init__()
        self.bn = nn.BatchNorm1d(size)
        self.fc = nn.Linear(size, classes)

    def forward(self, x):
        return self.fc(x)


def begun(steps=3, **args):
    """A site in its step number `steps`, with a step and the noise that it will draw."""
    torch.manual_seed(0)
    network = Classifier().double()
    method = FRAug(noise=5, hidden=7, ramp_steps=10, **args)
    method.prepare_network(network)
    site = method.at_site(SiteContext("A", network))
    site.start_round()
    site.steps = steps
    inputs, targets = torch.randn(8, 6, dtype=torch.float64), torch.tensor([0, 0, 1, 3, 3, 3, 0, 1])
    criterion = nn.CrossEntropyLoss()
    outputs = network.train()(inputs)
    step = Step(network, inputs, targets, outputs, criterion)
    return network, site, step


def test_gradients_taken_again_leave_the_prototypes_of_the_first_pass():
    network, site, step = begun(prototype_rate=0.4)
    other, alone, _ = begun(prototype_rate=0.4)
    for x in (step.inputs, step.inputs + 1):
        for result, part in ((network, site), (other, alone)):
            part.loss(Step(result, x, step.targets, result(x)))
        nearby = Step(network, x + 3, step.targets, network(x + 3))
        site.loss(nearby)  # as FedSAM does, at weights with other embeddings
        torch.testing.assert_close(site.means, alone.means)
        assert torch.equal(site._real, x)  # what g and m learn from
        for result, part in ((network, site), (other, alone)):
            part.after_step(Step(result, x, step.targets, step.outputs))
    assert site.steps == alone.steps == 5


# ---------------------------------------------------------------- federation


def test_everybody_begins_with_the_servers_generator_and_a_network_of_its_own(photo_config, tmp_path):
    config = photo_config("fraug")
    generators, transformations = [], []
    for site in "AB":
        torch.rand(ord(site) % 7)  # whatever else the process drew
        trainer = SiteTrainer(config, tmp_path / "photos", "cpu")
        trainer.open(site)
        part = trainer.parts["fraug"]
        generators.append(copy.deepcopy(part.generator.state_dict()))
        trainer.train(1)
        transformations.append(part.transformation.state_dict())
    server = next(m for m in Composition(config).methods if m.name == "fraug").generator().state_dict()
    for key, value in server.items():
        assert torch.equal(value, generators[0][key])
        assert torch.equal(value, generators[1][key])
    assert not torch.equal(transformations[0]["0.weight"], transformations[1]["0.weight"])


def test_norm_layers_stay_at_the_site_by_type():
    kept = FRAug().local_entries(build_network("resnet18", in_channels=3, out_channels=2))
    assert "layer2.0.downsample.1.running_mean" in kept
    assert "layer2.0.downsample.0.weight" not in kept


ALPHA, BETA, WEIGHT, RAMP, RATE_C, RATE = 0.7, 0.4, 0.8, 10, 0.3, 0.1


def perceptron(weights, x):
    hidden = (x @ weights["0.weight"].T + weights["0.bias"]).relu()
    return hidden @ weights["2.weight"].T + weights["2.bias"]


def discrepancy(x, y, width):
    """The squared MMD with a Gaussian kernel, over all pairs."""

    def kernel(a, b):
        return torch.exp(-(a[:, None] - b[None]).square().sum(2) / (2 * width**2)).mean()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


def entropy(logits):
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def ramp(step):
    return 1.0 if step >= RAMP else math.exp(-5 * (1 - step / RAMP) ** 2)


def trainable(values):
    return {key: value.clone().double().requires_grad_() for key, value in values.items()}


def test_the_head_learns_from_synthetic_embeddings(federate):
    """Eq. 2 to 6, with the draws of the run."""
    settings = {
        "fraug": {
            "alpha": ALPHA,
            "beta": BETA,
            "lambda_syn": WEIGHT,
            "ramp_steps": RAMP,
            "prototype_rate": RATE_C,
            "noise": 3,
            "hidden": 6,
            "learning_rate": RATE,
        }
    }
    run = federate("fraug", plan=UNEVEN, settings=settings, local_epochs=3)
    method = next(m for m in Composition(run.config).methods if m.name == "fraug")
    first = {key.removeprefix("layers."): v for key, v in method.generator().state_dict().items()}
    sent, kept = {}, {}

    def train(site, round_, network):
        generator = first
        if round_ > 1:
            sites = sent[round_ - 1]
            generator = mean(list(sites.values()), [run.server.sites[one] for one in sites])
        g, batches = trainable(generator), run.batches[site, round_]
        own = kept.setdefault(site, {"means": {}, "steps": 0})
        network.train()
        for (x, y), drawn in zip(batches, batches.draws, strict=True):
            draws = list(drawn)
            if "m" not in own:  # the transformation network's first weights
                names = ("0.weight", "0.bias", "2.weight", "2.bias")
                own["m"] = trainable({name: draws.pop(0) for name in names})
            m, means, head = own["m"], own["means"], network.head[2]
            u = network.encoder(x).mean((2, 3))
            loss = cross_entropy(head(u), y)
            real = u.detach()
            for label in y.unique().tolist():  # Eq. 4
                values = real[y == label].mean(0)
                rate = RATE_C * ramp(own["steps"]) if label in means else 1.0
                means[label] = (1 - rate) * means.get(label, 0.0) + rate * values
            classes = torch.tensor(sorted(means))
            bases = (real, torch.stack([means[c] for c in sorted(means)]))
            rows = draws[0].double()
            noise = [rows[: len(y)], rows[len(y) :][classes]]
            share = WEIGHT * ramp(own["steps"])

            def synthetic(noise=noise, bases=bases, y=y, classes=classes, g=g, m=m, share=share):
                embeddings = []
                for z, base, labels in zip(noise, bases, (y, classes), strict=True):
                    residual = perceptron(g, torch.cat([z, one_hot(labels, 2).double()], 1))
                    embeddings.append(base + share * perceptron(m, residual))
                return embeddings

            embeddings = [one.detach() for one in synthetic()]
            loss = loss + cross_entropy(head(embeddings[0]), y)
            loss = loss + cross_entropy(head(embeddings[1]), classes, reduction="sum")
            parameters = list(network.parameters())
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= 0.05 * gradient

            weight, bias = head.weight.detach(), head.bias.detach()
            width = max(float(real.var(0).sum().sqrt()), 1e-6)
            u_hat, c_hat = synthetic()
            logits, of_classes = (one @ weight.T + bias for one in (u_hat, c_hat))
            generating = cross_entropy(logits, y) - ALPHA * discrepancy(u_hat, real, width)
            pairs = zip(c_hat.split(1), bases[1].split(1), strict=True)
            distances = sum(discrepancy(a, b, width) for a, b in pairs)
            transforming = BETA * discrepancy(u_hat, real, width) - entropy(logits).mean()
            transforming = transforming + BETA * distances - entropy(of_classes).sum()
            of_g = torch.autograd.grad(generating, list(g.values()), retain_graph=True)
            of_m = torch.autograd.grad(transforming, list(m.values()))
            with torch.no_grad():
                for value, gradient in zip((*g.values(), *m.values()), (*of_g, *of_m), strict=True):
                    value -= RATE * gradient
            own["steps"] += 1
        sent.setdefault(round_, {})[site] = {key: value.detach() for key, value in g.items()}

    def norm_layer(key):
        return key.startswith("encoder.") and key.split(".")[2] == "1"

    assert_models(run, federated_averaging(run, train, norm_layer), atol=5e-6)
    for round_, sites in sent.items():
        for site, expected in sites.items():
            payload = run.replies[round_][site].payload
            values = {key.removeprefix("fraug/layers."): value for key, value in payload.items()}
            assert_same(values, expected, atol=5e-6)
