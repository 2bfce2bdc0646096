"""FRAug in a whole federation, against Eq. 1 to 6 of Chen et al., with the draws of the run."""

from __future__ import annotations

import math

import torch
from reference import UNEVEN, assert_models, assert_same, federated_averaging, mean
from torch.nn.functional import cross_entropy, one_hot

from medfedaug.federation.composition import Composition

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
    run = federate("fraug", plan=UNEVEN, settings=settings, network="reference_convolutional", local_epochs=3)
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
                found = real[y == label].mean(0)
                rate = RATE_C * ramp(own["steps"]) if label in means else 1.0
                means[label] = (1 - rate) * means.get(label, 0.0) + rate * found
            classes = torch.tensor(sorted(means))
            bases = (real, torch.stack([means[c] for c in sorted(means)]))
            noise = [draw.double() for draw in draws[:2]]
            share = WEIGHT * ramp(own["steps"])

            def synthetic(noise=noise, bases=bases, y=y, classes=classes, g=g, m=m, share=share):
                made = []
                for z, base, labels in zip(noise, bases, (y, classes), strict=True):
                    residual = perceptron(m, perceptron(g, torch.cat([z, one_hot(labels, 2).double()], 1)))
                    made.append(base + share * residual)
                return made

            made = [one.detach() for one in synthetic()]
            loss = loss + cross_entropy(head(made[0]), y)
            loss = loss + cross_entropy(head(made[1]), classes, reduction="sum")
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
            transforming = -entropy(logits).mean() - entropy(of_classes).sum()
            pairs = zip(c_hat.split(1), bases[1].split(1), strict=True)
            distances = [discrepancy(a, b, width) for a, b in pairs]
            transforming = transforming + BETA * (discrepancy(u_hat, real, width) + sum(distances))
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
            found = {key.removeprefix("fraug/layers."): value for key, value in payload.items()}
            assert_same(found, expected, atol=5e-6)
