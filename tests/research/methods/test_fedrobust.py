"""FedRobust: descent and ascent written out in float64, what stays at the site, and what is refused."""

import pytest
import torch
from reference import UNEVEN, assert_models, federated_averaging
from torch import nn
from torch.nn.functional import cross_entropy

from medfedaug import functional as F
from medfedaug.methods.base import SiteContext, Step
from medfedaug.research.methods.fedrobust import FedRobust


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
    torch.testing.assert_close(F.affine_shift(x, matrix, shift), expected)
    assert torch.equal(F.affine_shift(x, torch.eye(3).double(), torch.zeros(3).double()), x)
    with pytest.raises(ValueError, match=r"expected matrix \[3, 3\] and shift \[3\]"):
        F.affine_shift(x, matrix[:2], shift)


# ---------------------------------------------------------------- one step


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()


def batches(sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.rand(n, 2, 3, 3, generator=generator, dtype=torch.float64),
            torch.randint(3, (n,), generator=generator),
        )
        for n in sizes
    ]


def train(network, part, data, lr, near=0.0):
    """The trainer's order; with `near`, the gradients are taken again at weights that much larger."""
    part.start_round()
    network.train()
    for x, y in data:
        outputs = network(x)
        loss = nn.functional.cross_entropy(outputs, y)
        step = Step(network, x, y, outputs, nn.functional.cross_entropy)
        network.zero_grad()
        loss.backward()
        if near:
            with torch.no_grad():
                before = [p.clone() for p in network.parameters()]
                for parameter in network.parameters():
                    parameter += near
            network.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            with torch.no_grad():
                for parameter, value in zip(network.parameters(), before, strict=True):
                    parameter.copy_(value)
        part.before_step(step)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= lr * parameter.grad


def by_hand(network, data, lr, rate, penalty, near):
    """Simultaneous steps of the minimax problem, whose objective is written out."""
    parameters = {name: p.detach().clone() for name, p in network.named_parameters()}
    matrix, shift = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for x, y in data:
        at = {name: (p + near).requires_grad_() for name, p in parameters.items()}
        matrix, shift = matrix.requires_grad_(), shift.requires_grad_()
        moved = torch.stack([(matrix @ image.flatten(1) + shift[:, None]).view(2, 3, 3) for image in x])
        loss = nn.functional.cross_entropy(torch.func.functional_call(network, at, moved), y)
        cost = penalty * ((matrix - torch.eye(2)).square().sum() + shift.square().sum())
        slopes = torch.autograd.grad(loss, list(at.values()), retain_graph=True)
        up = torch.autograd.grad(loss - cost, [matrix, shift])
        pairs = zip(parameters.items(), slopes, strict=True)
        parameters = {name: value - lr * slope for (name, value), slope in pairs}
        matrix, shift = (matrix + rate * up[0]).detach(), (shift + rate * up[1]).detach()
    return parameters, matrix, shift


def test_the_model_goes_down_and_the_shift_goes_up():
    near = 0.3
    data = batches([4, 1, 3])  # one of a single image
    network, plain = small_network(), small_network()
    part = FedRobust(0.7, 0.9).at_site(SiteContext("A", network))
    assert part.state() == part.metrics() == {}
    train(network, part, data, 0.5, near)
    # The hooks of `network` would shift once more.
    parameters, matrix, shift = by_hand(plain, data, 0.5, 0.9, 0.7, near)
    torch.testing.assert_close(part.state()["matrix"], matrix)
    torch.testing.assert_close(part.state()["shift"], shift)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.detach(), parameters[name])
    assert part.metrics() == {
        "matrix": pytest.approx(float((matrix - torch.eye(len(matrix))).norm())),
        "shift": pytest.approx(float(shift.norm())),
    }
    assert part.metrics()["shift"] > 0.01


def test_evaluation_sees_the_images_as_they_are():
    network = small_network()
    part = FedRobust().at_site(SiteContext("A", network))
    data = batches([4])
    train(network, part, data, 0.1)
    plain = small_network()
    plain.load_state_dict(network.state_dict())
    assert torch.equal(network.eval()(data[0][0]), plain(data[0][0]))
    assert not torch.equal(network.train()(data[0][0]), plain(data[0][0]))


def test_values_kept_of_a_round_do_not_change():
    network = small_network()
    part = FedRobust().at_site(SiteContext("A", network))
    kept = {"matrix": torch.eye(2).double() * 2, "shift": torch.ones(2).double()}
    part.restore(kept)
    train(network, part, batches([4]), 0.1)
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
