"""FedRobust in a whole federation, against the descent and ascent of Reisizadeh et al., NeurIPS 2020."""

from __future__ import annotations

import pytest
import torch
from reference import UNEVEN, assert_models, federated_averaging
from torch.nn.functional import cross_entropy


def test_every_site_has_a_worst_shift_of_its_own(federate):
    penalty, other, rate = 0.4, 0.2, 0.5
    settings = {"fedrobust": {"penalty": penalty, "shift_penalty": other, "learning_rate": rate}}
    run = federate(
        "fedrobust", plan=UNEVEN, settings=settings, network="reference_convolutional", local_epochs=2
    )
    shifts = {}

    def train(site, round_, network):
        eye = torch.eye(3, dtype=torch.float64)
        matrix, shift = shifts.get(site, (eye, torch.zeros(3, dtype=torch.float64)))
        network.train()
        for x, y in run.batches[site, round_]:
            matrix, shift = matrix.clone().requires_grad_(), shift.clone().requires_grad_()
            shifted = torch.einsum("ij,bjhw->bihw", matrix, x) + shift[:, None, None]
            loss = cross_entropy(network(shifted), y)
            parameters = list(network.parameters())
            gradients = torch.autograd.grad(loss, [*parameters, matrix, shift])
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=False):
                    parameter -= 0.05 * gradient
                matrix = matrix + rate * (gradients[-2] - 2 * penalty * (matrix - eye))
                shift = shift + rate * (gradients[-1] - 2 * other * shift)
        shifts[site] = (matrix, shift)

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    for site, (matrix, shift) in shifts.items():
        metrics = run.server.rounds[2]["sites"][site]
        eye = torch.eye(3, dtype=torch.float64)
        assert metrics["fedrobust/matrix"] == pytest.approx(float((matrix - eye).norm()), rel=1e-4)
        assert metrics["fedrobust/shift"] == pytest.approx(float(shift.norm()), rel=1e-4)
