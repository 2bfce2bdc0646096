"""FedRoD against Chen and Chao, ICLR 2022: balanced softmax, and a personal and a generic head."""

from __future__ import annotations

import pytest
import torch
from reference import (
    UNEVEN,
    Points,
    assert_models,
    assert_same,
    assert_scores,
    copied,
    federated_averaging,
    labels_of,
    pixels,
    step_down,
)
from torch import nn
from torch.nn.functional import cross_entropy

from medfedaug.methods import FedRoD
from medfedaug.methods.base import SiteContext, Step
from medfedaug.methods.fedrod import FedRoDSite

RATE, GAMMA = 0.05, 0.8


def counts(run, site):
    return torch.bincount(labels_of(run, site), minlength=2).double()


def remove_some(root):
    """Leave fewer images of the second class at each site."""
    for site, keep in (("A", 2), ("B", 5), ("C", 2)):
        folders = sorted(path for path in (root / "photos" / site).iterdir() if path.is_dir())
        for file in sorted(folders[1].iterdir())[keep:]:
            file.unlink()


def test_the_generic_head_is_balanced_and_the_personal_one_stays(federate, make_photos, tmp_path):
    sizes = {"A": 5, "B": 10, "C": 15}
    for site, per_class in sizes.items():
        make_photos(site, per_class, size=8)
    remove_some(tmp_path)
    run = federate(
        "fedrod",
        plan=UNEVEN,
        sizes=sizes,
        settings={"fedrod": {"gamma": GAMMA}},
        network="reference_convolutional",
        states=tmp_path / "states",
        local_epochs=2,
    )
    numbers = {site: counts(run, site) for site in "ABC"}
    assert all(float(n[0]) > float(n[1]) > 0 for n in numbers.values())
    heads, kept = {}, {}

    def train(site, round_, network):
        network.train()
        weight, bias = heads.get(site, (torch.zeros(2, 5).double(), torch.zeros(2).double()))
        seen = {}
        handle = network.head[2].register_forward_pre_hook(lambda _, args: seen.update(z=args[0].detach()))
        for x, y in run.batches[site, round_]:
            outputs = network(x)
            scaled = numbers[site] ** GAMMA * torch.exp(outputs)
            balanced = -torch.log(scaled[range(len(y)), y] / scaled.sum(dim=1)).mean()
            weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
            personal = cross_entropy(outputs.detach() + seen["z"] @ weight.T + bias, y)
            step_down(network, balanced, RATE)
            changes = torch.autograd.grad(personal, [weight, bias])
            weight, bias = weight.detach() - RATE * changes[0], bias.detach() - RATE * changes[1]
        handle.remove()
        heads[site] = kept[site, round_] = weight, bias

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    selected = run.server.selected_round
    for site in "ABC":
        last = max(r for r in range(1, selected + 1) if site in run.took_part(r))
        weight, bias = kept[site, last]
        assert_same(
            run.sites[site].trainer.parts["fedrod"].personal.state_dict(), {"weight": weight, "bias": bias}
        )
        assert float(weight.norm()) > 1e-3
        # Scored with the sum of both heads, of which the personal one is no part of the network.
        network = copied(run.network(), rounds[selected - 1].model).eval()
        with torch.no_grad():
            network.head[2].weight.add_(weight)
            network.head[2].bias.add_(bias)
            assert_scores(run, site, network(pixels(run, site, "test") / 255))
        assert set(run.sites[site].trainer.composition.sent) == set(run.models[0])


def test_without_the_shift_the_generic_model_equals_fedavg(federate):
    options = {"plan": UNEVEN, "network": "reference_convolutional"}
    generic = federate("fedrod", settings={"fedrod": {"gamma": 0.0}}, **options)
    plain = federate("fedavg", **options)
    assert_same(generic.models[3], plain.models[3])


@pytest.mark.parametrize("gamma", [1.0, 0.01, 0.0])
def test_a_class_without_images_leaves_the_sum(gamma):
    torch.manual_seed(0)
    network, x, y = nn.Linear(4, 3), torch.rand(5, 4), torch.tensor([0, 0, 2, 0, 2])
    context = SiteContext(
        "A",
        network,
        training_batches=lambda: [(x, y)],
        task=Points(),
        optimiser=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    )
    part = FedRoDSite(FedRoD(gamma), context)
    part.start_round()
    outputs = network(x)
    step = Step(network, x, y, outputs, criterion=cross_entropy)
    scaled = torch.tensor([3.0, 0.0, 2.0]) ** gamma * outputs.exp()
    expected = -torch.log(scaled[range(5), y] / scaled.sum(dim=1)).mean()
    torch.testing.assert_close(step.task_loss + part.loss(step), expected)
