"""The received model as teacher of a site with missing labels: weights by round, and its target."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from medfedaug.data.annotation import Annotation
from medfedaug.methods.base import SiteContext, Step
from medfedaug.methods.distillation import DistilledSite
from medfedaug.tasks.losses import build_loss
from medfedaug.tasks.partial_loss import PartialLoss, distillation_loss

FIRST = (True, True, False)
CODE = Annotation.of(3, [FIRST], has_unknown=False)


def site_in(round_, rounds=5):
    """A site with a network of one layer, in a round."""
    loss = PartialLoss(build_loss("segmentation", 3), CODE, "distilled")
    task = SimpleNamespace(annotation=CODE, criterion=loss)
    network = nn.Conv2d(1, 3, 3, padding=1)
    return DistilledSite(SiteContext("A", network, task=task, round=lambda: round_, rounds=rounds), loss)


def step_of(site):
    """A batch of two images, of which only the first class is annotated."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 1, 6, 6, generator=generator)
    labels = torch.randint(2, (2, 1, 6, 6), generator=generator)
    network = site.context.network
    return Step(network, inputs, CODE.encode(labels, FIRST), network(inputs))


@pytest.mark.parametrize(("round_", "share"), [(1, 0.01), (3, 0.1), (5, 1.0), (6, 1.0)])
def test_missing_classes_return_to_the_marginal_loss(round_, share):
    site = site_in(round_)
    site.start_round()
    assert site._partial_loss.share == pytest.approx(share)
    site.end_round()
    assert site._partial_loss.share == 1


@pytest.mark.parametrize(("round_", "weight"), [(2, 0.75), (4, 0.25)])
def test_the_target_is_the_model_that_the_site_received(round_, weight):
    site = site_in(round_)
    site.start_round()
    received = {name: value.detach().clone() for name, value in site.context.network.state_dict().items()}
    with torch.no_grad():
        site.context.network.weight.normal_()
    step = step_of(site)
    teacher = torch.func.functional_call(site.context.network, received, step.inputs)
    expected = weight * distillation_loss(step.outputs, teacher, CODE.decode(step.targets))
    assert torch.allclose(site.loss(step), expected)


@pytest.mark.parametrize(("round_", "rounds"), [(1, 5), (5, 5), (1, 1)])
def test_first_and_last_round_have_no_teacher(round_, rounds):
    site = site_in(round_, rounds)
    site.start_round()
    assert site.loss(step_of(site)) is None


def test_a_single_round_has_the_marginal_loss():
    site = site_in(1, rounds=1)
    site.start_round()
    assert site._partial_loss.share == 1
