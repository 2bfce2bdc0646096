"""FedAWA against Shi et al., CVPR 2025: weights in the mean that are learned from client vectors."""

from __future__ import annotations

import math

import pytest
import torch
from reference import UNEVEN, Round, assert_models, copied, descend, entries, mean
from torch import nn

from medfedaug.methods import FedAWA
from medfedaug.methods.base import RoundMean, ServerContext, SiteUpdate


def objective(logits, local, model):
    """The two sums, one site after the other."""
    p = [torch.exp(one) / sum(torch.exp(other) for other in logits) for one in logits]
    tau = [one - model for one in local]
    middle = sum(share * vector for share, vector in zip(p, tau, strict=True))
    result = 0
    for share, w, vector in zip(p, local, tau, strict=True):
        cosine = (w * model).sum() / (w.norm() * model.norm())
        result = result + share * (1 - cosine) + share * (vector - middle).norm()
    return result


def adam(logits, local, model, rate, steps):
    """Kingma and Ba, Algorithm 1."""
    m = v = torch.zeros_like(logits)
    for t in range(1, steps + 1):
        logits = logits.clone().requires_grad_()
        (g,) = torch.autograd.grad(objective(logits, local, model), logits)
        m, v = 0.5 * m + 0.5 * g, 0.999 * v + 0.001 * g * g
        logits = logits.detach() - rate * (m / (1 - 0.5**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return logits


@pytest.mark.parametrize("settings", [{}, {"rate": 0.3, "steps": 4}], ids=["as published", "faster"])
def test_weights_are_learned_from_the_sites_vectors(federate, settings):
    run = federate(
        "fedawa",
        plan=UNEVEN,
        settings={"fedawa": settings},
        network="reference_convolutional",
        local_epochs=2,
    )
    start = run.network()
    names = [name for name, _ in start.named_parameters()]

    def flat(state):
        return torch.cat([state[name].flatten() for name in names])

    model, rounds, kept, shares = entries(start), [], {}, []
    for round_ in range(1, 4):
        local = {}
        for site in run.took_part(round_):
            network = descend(copied(start, model), run.batches[site, round_], 0.05)
            local[site] = entries(network)
        total = sum(run.server.sites[site] for site in local)
        for site in local:
            kept.setdefault(site, run.server.sites[site] / total)
        logits = adam(
            torch.tensor([kept[site] for site in local], dtype=torch.float64),
            [flat(one) for one in local.values()],
            flat(model),
            settings.get("rate", 0.001),
            settings.get("steps", 1),
        )
        kept.update(zip(local, logits.tolist(), strict=True))
        weights = [math.exp(one) for one in logits.tolist()]
        model = mean(list(local.values()), weights)
        rounds.append(Round(model, local))
        shares.append({site: w / sum(weights) for site, w in zip(local, weights, strict=True)})
    assert_models(run, rounds, atol=2e-6)
    for record, expected in zip(run.server.rounds, shares, strict=True):
        assert record["methods"]["fedawa"]["weights"] == pytest.approx(expected, abs=1e-5)
    first = torch.tensor([1 / 6, 1 / 3, 1 / 2]).softmax(dim=0).tolist()  # of 6, 12 and 18 images
    moved = max(abs(a - b) for a, b in zip(shares[0].values(), first, strict=True))
    assert 1e-6 < moved < 1e-3 if not settings else moved > 1e-2


def one_round(server, round_, models, previous):
    for site, value in models.items():
        server.accept(SiteUpdate(site, round_, {"weight": torch.tensor(value)}, {}, 1.0))
    return server.result(RoundMean(round_, {"weight": torch.tensor(previous)}, {}, {}))["weight"]


def test_equal_models_and_a_restart():
    context = ServerContext(nn.Linear(2, 1, bias=False), 1)
    whole, other = (FedAWA(rate=0.5).aggregator(context) for _ in range(2))
    equal = {"A": [[2.0, 1.0]], "B": [[2.0, 1.0]]}
    assert one_round(whole, 1, equal, [[1.0, 1.0]]).tolist() == [[2.0, 1.0]]
    assert whole.shares == pytest.approx({"A": 0.5, "B": 0.5})
    apart = {"A": [[2.0, 1.0]], "B": [[5.0, -1.0]], "C": [[2.0, 1.5]]}
    one_round(whole, 2, apart, [[1.0, 1.0]])
    assert whole.shares["B"] < min(whole.shares["A"], whole.shares["C"])  # the odd one loses
    other.restore(whole.state())
    assert torch.equal(one_round(whole, 3, apart, [[2.0, 1.0]]), one_round(other, 3, apart, [[2.0, 1.0]]))
