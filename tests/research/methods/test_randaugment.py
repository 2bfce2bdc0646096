"""RandAugment in a federation: operations on training images, and none at test."""

import pytest
import torch
from monai.utils import CommonKeys as Keys
from reference import UNEVEN, assert_models, assert_tested, descend, federated_averaging, pixels
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.methods import build_methods
from medfedaug.methods.base import SiteContext
from medfedaug.research.methods.randaugment import RandAugment
from medfedaug.tasks import ClassificationTask, SegmentationTask


@pytest.mark.parametrize("number", [1, 2])
def test_training_images_pass_as_many_operations_as_asked_for(federate, number):
    settings = {"randaugment": {"num_ops": number, "operations": ["flip_x", "flip_y"]}}
    run = federate("randaugment", plan=UNEVEN, settings=settings, local_epochs=2)
    result = set()
    for (site, _), batches in run.batches.items():
        images = pixels(run, site) / 255
        once = (images.flip(2), images.flip(3))
        result |= set(batches.assert_images(*(once if number == 1 else (images, images.flip(2, 3)))))
    assert result == {0, 1}

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    for site in "ABC":
        model = rounds[run.server.selected_round - 1].model
        assert_tested(run, site, model, lambda images: images / 255)


@pytest.mark.parametrize("dense", [True, False])
def test_randaugment_moves_labels_where_pixels_have_them(dense):
    task = SegmentationTask(2) if dense else ClassificationTask(["a", "b"], scale=True)
    part = RandAugment(2, 9.0, ["flip_x", "rotate"]).at_site(SiteContext("A", nn.Identity(), task=task))
    assert part.transforms(training=False) == ()
    (transform,) = part.transforms(training=True)
    transform.set_random_state(0)
    label = (torch.rand(1, 8, 8) * 3).to(torch.uint8) if dense else torch.tensor(1)
    out = transform({Keys.IMAGE: torch.rand(1, 8, 8), Keys.LABEL: label})
    assert torch.equal(torch.as_tensor(out[Keys.LABEL]), label) is not dense
    with pytest.raises(ConfigError, match=r"randaugment: operations \['blur'\]"):
        build_methods([{"name": "randaugment", "args": {"operations": ["blur"]}}])
