"""RandAugment in a federation: operations on training images, and none at test."""

from __future__ import annotations

import pytest
from reference import UNEVEN, assert_models, assert_tested, descend, federated_averaging, pixels


@pytest.mark.parametrize("number", [1, 2])
def test_training_images_pass_as_many_operations_as_asked_for(federate, number):
    settings = {"randaugment": {"num_ops": number, "operations": ["flip_x", "flip_y"]}}
    run = federate("randaugment", plan=UNEVEN, settings=settings, local_epochs=4)
    found = set()
    for (site, _), batches in run.batches.items():
        images = pixels(run, site) / 255
        once = (images.flip(2), images.flip(3))
        found |= set(batches.assert_images(*(once if number == 1 else (images, images.flip(2, 3)))))
    assert found == {0, 1}

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    for site in "ABC":
        model = rounds[run.server.selected_round - 1].model
        assert_tested(run, site, model, lambda images: images / 255)
