"""FedProx against Li et al., MLSys 2020, Eq. 2."""

from __future__ import annotations

import pytest
import torch
from reference import UNEVEN, assert_models, descend, federated_averaging
from torch import nn

from medfedaug.methods import (
    FedProx,
)
from medfedaug.methods.base import SiteContext, Step


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_sites_descend_on_the_loss_and_the_proximal_term(federate, mu):
    run = federate(
        "fedprox",
        plan=UNEVEN,
        settings={"fedprox": {"mu": mu}},
        network="reference_convolutional",
        local_epochs=3,
    )

    def train(site, round_, network):
        start = [p.detach().clone() for p in network.parameters()]

        def term(net, _x, _y):
            pairs = zip(net.parameters(), start, strict=True)
            return mu / 2 * sum(((p - begun) ** 2).sum() for p, begun in pairs)

        descend(network, run.batches[site, round_], 0.05, term)

    assert_models(run, federated_averaging(run, train))


def test_fedprox_term_is_half_mu_times_the_squared_distance():
    network = nn.Linear(2, 1)
    part = FedProx(mu=0.4).at_site(SiteContext("A", network, lambda: None))
    part.start_round()
    start = [p.detach().clone() for p in network.parameters()]
    step = Step(network, torch.zeros(1), torch.zeros(1), torch.zeros(1))
    assert float(part.loss(step).detach()) == 0.0
    with torch.no_grad():
        network.weight.add_(torch.tensor([[1.0, 2.0]]))
        network.bias.add_(3.0)
    loss = part.loss(step)
    assert float(loss.detach()) == pytest.approx(0.2 * (1 + 4 + 9))
    loss.backward()
    torch.testing.assert_close(network.weight.grad, 0.4 * (network.weight.detach() - start[0]))
