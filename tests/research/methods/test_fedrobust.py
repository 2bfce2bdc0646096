"""FedRobust: descent and ascent written out in float64, what stays at the site, and what is refused."""

from dataclasses import replace

import pytest
import torch
from reference import UNEVEN, assert_models, federated_averaging
from torch import nn
from torch.nn.functional import cross_entropy

from medfedaug import functional as F
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation import run_in_process
from medfedaug.methods.base import SiteContext, Step
from medfedaug.research.methods.fedrobust import FedRobust
from medfedaug.tasks import SegmentationTask


@pytest.mark.parametrize("size", [(2, 3), (2, 3, 4), ()])
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


def by_hand(network, data, lr, rate, penalties, near):
    """Simultaneous steps of the minimax problem, whose objective is written out."""
    parameters = {name: p.detach().clone() for name, p in network.named_parameters()}
    size = 18
    matrix, shift = torch.eye(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for x, y in data:
        at = {name: (p + near).requires_grad_() for name, p in parameters.items()}
        matrix, shift = matrix.requires_grad_(), shift.requires_grad_()
        moved = torch.stack([(matrix @ image.flatten() + shift).view(2, 3, 3) for image in x])
        loss = nn.functional.cross_entropy(torch.func.functional_call(network, at, moved), y)
        cost = penalties[0] * (matrix - torch.eye(size)).square().sum() + penalties[1] * shift.square().sum()
        slopes = torch.autograd.grad(loss, list(at.values()), retain_graph=True)
        up = torch.autograd.grad(loss - cost, [matrix, shift])
        pairs = zip(parameters.items(), slopes, strict=True)
        parameters = {name: value - lr * slope for (name, value), slope in pairs}
        matrix, shift = (matrix + rate * up[0]).detach(), (shift + rate * up[1]).detach()
    return parameters, matrix, shift


def test_the_model_goes_down_and_the_shift_of_pixels_goes_up():
    near = 0.3
    data = batches([4, 1, 3])  # one of a single image
    network, plain = small_network(), small_network()
    part = FedRobust(0.7, 0.4, 0.9, "pixels").at_site(SiteContext("A", network))
    assert part.state() == part.metrics() == {}
    train(network, part, data, 0.5, near)
    # The hooks of `network` would shift once more.
    parameters, matrix, shift = by_hand(plain, data, 0.5, 0.9, (0.7, 0.4), near)
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


def test_images_that_do_not_fit_are_refused_with_the_reason(photo_config, tmp_path):
    context = SiteContext("A", small_network(), task=SegmentationTask(2))
    with pytest.raises(ConfigError, match="label maps would not follow"):
        FedRobust(over="pixels").at_site(context)
    part = FedRobust(over="pixels").at_site(replace(context, task=None))
    part.network(torch.rand(1, 2, 3, 3).double())
    with pytest.raises(ConfigError, match="an image of 32 values after those of 18"):
        part.network(torch.rand(1, 2, 4, 4).double())
    config = photo_config("fedrobust", {"fedrobust": {"over": "pixels"}})  # 40 x 40 x 3
    with pytest.raises(RunFailed, match="4800 values of an image would have 23040000; take over=channels"):
        run_in_process(config, tmp_path / "photos", ["A", "B"], "cpu")


def test_every_site_has_another_worst_shift(federate):
    penalty, other, rate = 0.4, 0.2, 0.5
    settings = {"fedrobust": {"penalty": penalty, "shift_penalty": other, "learning_rate": rate}}
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
                shift = shift + rate * (gradients[-1] - 2 * other * shift)
        shifts[site] = (matrix, shift)

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    for site, (matrix, shift) in shifts.items():
        metrics = run.server.rounds[2]["sites"][site]
        eye = torch.eye(3, dtype=torch.float64)
        assert metrics["fedrobust/matrix"] == pytest.approx(float((matrix - eye).norm()), rel=1e-4)
        assert metrics["fedrobust/shift"] == pytest.approx(float(shift.norm()), rel=1e-4)
