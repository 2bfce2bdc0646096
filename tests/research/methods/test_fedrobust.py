"""FedRobust: descent and ascent written out in float64, what stays at the site, and what is refused."""

import pytest
import torch
from reference import UNEVEN, assert_models, federated_averaging
from torch import nn
from torch.nn.functional import cross_entropy

from medfedaug.methods.base import SiteContext
from medfedaug.research.methods.fedrobust import FedRobust, affine_shift


@pytest.mark.parametrize("size", [(2, 3), (2, 3, 4)])
def test_the_shift_is_affine_in_the_channels_of_each_voxel(size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *size, generator=generator, dtype=torch.float64)
    matrix = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    shift = torch.randn(3, generator=generator, dtype=torch.float64)
    expected = torch.empty_like(x)
    for b in range(2):
        for channel in range(3):
            row = sum(matrix[channel, k] * x[b, k] for k in range(3))
            expected[b, channel] = row + shift[channel]
    torch.testing.assert_close(affine_shift(x, matrix, shift), expected)
    assert torch.equal(affine_shift(x, torch.eye(3).double(), torch.zeros(3).double()), x)


def begun():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)).double()
    part = FedRobust().at_site(SiteContext("A", network))
    assert part.state() == part.metrics() == {}
    part.restore({"matrix": torch.eye(2).double() * 2, "shift": torch.ones(2).double()})
    return network, part


def test_evaluation_sees_the_images_as_they_are():
    network, _ = begun()
    x = torch.rand(4, 2, 3, 3).double()
    plain = network[2](network[1](network[0](x)))
    assert torch.equal(network.eval()(x), plain)
    assert not torch.equal(network.train()(x), plain)


def test_values_kept_of_a_round_do_not_change():
    network, part = begun()
    kept = {key: value.clone() for key, value in part.state().items()}
    part.restore(kept)
    network.train()(torch.rand(1, 2, 3, 3).double()).square().sum().backward()
    part.before_step(None)
    assert torch.equal(kept["shift"], torch.ones(2).double())
    assert not torch.equal(part.state()["shift"], kept["shift"])


# ---------------------------------------------------------------- federation


def test_every_site_has_another_worst_shift(federate):
    penalty, rate = 0.4, 0.5
    settings = {"fedrobust": {"penalty": penalty, "learning_rate": rate}}
    run = federate("fedrobust", plan=UNEVEN, settings=settings, local_epochs=2)
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
                shift = shift + rate * (gradients[-1] - 2 * penalty * shift)
        shifts[site] = (matrix, shift)

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    for site, (matrix, shift) in shifts.items():
        metrics = run.server.rounds[2]["sites"][site]
        eye = torch.eye(3, dtype=torch.float64)
        assert metrics["fedrobust/matrix"] == pytest.approx(float((matrix - eye).norm()), rel=1e-4)
        assert metrics["fedrobust/shift"] == pytest.approx(float(shift.norm()), rel=1e-4)
